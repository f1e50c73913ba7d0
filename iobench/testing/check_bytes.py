"""Checks: the stored bytes equal the given bytes, at every size."""

from __future__ import annotations

import numpy as np

from iobench.testing.check import check
from iobench.testing.content import content
from iobench.testing.harness import WriterHarness, expect, expect_same

_MOST = 24 << 20  # bytes of the largest file in the ordinary checks
_OVER = (1 << 31) + 4097


def _round_trips(harness: WriterHarness, sizes: set[int]) -> None:
    for seed, size in enumerate(sorted(sizes)):
        data = content(size, seed)
        harness.expect_round_trip(harness.image("file", data), data)


@check(needs_storage=False)
def sizes_around_alignments(harness: WriterHarness) -> None:
    """Files of 0 and 1 bytes and around 512 and 4096 are stored exactly."""
    _round_trips(harness, {0, 1} | {size + d for size in (512, 4096, 8192) for d in (-1, 0, 1)})


@check(needs_storage=False)
def sizes_around_blocks(harness: WriterHarness) -> None:
    """Files around one block and around several are stored exactly."""
    block = getattr(harness.writer.options, "block_size", harness.block_size)
    sizes = {n * block + d for n in (1, 2, 5) for d in (-1, 0, 1)}
    _round_trips(harness, {size for size in sizes if size <= _MOST})


@check()
def another_size_replaced(harness: WriterHarness) -> None:
    """A file that replaces a longer or shorter one has its own size."""
    harness.put("file", content(3 * harness.block_size // 2 + 5, 1).tobytes())
    for size in (4099, 0, harness.block_size + 513):
        harness.expect_round_trip(harness.image("file", content(size)), content(size))


@check()
def nested_paths(harness: WriterHarness) -> None:
    """Directories in an image's path are created, and may already exist. Names with spaces, dots
    and non-ASCII letters work like any other name.
    """
    odd = ("with space.bin", ".hidden", "poids-été.pt", "x" * 120, "a..b/-rf")
    for name in ("a/b/c/file", "a/b/other", "a/b/c/third", *odd):
        harness.expect_round_trip(harness.image(name, content(4097)), content(4097))


@check(needs_storage=False, large=True)
def one_segment_over_2_gib(harness: WriterHarness) -> None:
    """One segment of more than 2 GiB is stored and read with no offset cut to 31 bits.

    Only marks at its ends and around 2 GiB are written; all other pages are untouched zeros.
    """
    memory = np.zeros(_OVER, dtype=np.uint8)
    marks = [(0, 4099), ((1 << 31) - 4099, (1 << 31) + 777), (_OVER - 3333, _OVER)]
    for seed, (start, stop) in enumerate(marks):
        memory[start:stop] = content(stop - start, seed)
    moved = harness.write(harness.image("file", memory), durable=False)
    expect(moved.bytes == _OVER, f"the Transfer has {moved.bytes} bytes, {_OVER} were moved")
    back = harness.image("file", np.zeros(_OVER, dtype=np.uint8))
    for start, stop in marks:
        harness.read(back, start=start, stop=stop)
        if harness.stores:
            (found,) = back.views(start, stop)
            expect_same(found, memory[start:stop], f"bytes [{start}, {stop})")
