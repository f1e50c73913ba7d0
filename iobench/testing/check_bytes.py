"""Checks: the bytes that arrive are the bytes that were given, at every size."""

from __future__ import annotations

import numpy as np

from iobench.testing.check import check
from iobench.testing.content import content
from iobench.testing.expect import expect, expect_same
from iobench.testing.harness import WriterHarness

_MOST = 24 << 20  # bytes of the largest file in the ordinary checks
_OVER = (1 << 31) + 4097


def _round_trips(rig: WriterHarness, sizes: set[int]) -> None:
    for seed, size in enumerate(sorted(sizes)):
        data = content(size, seed)
        rig.expect_round_trip(rig.image("file", data), data)


@check(needs_storage=False)
def sizes_around_alignments(rig: WriterHarness) -> None:
    """Files of 0 and 1 bytes and around 512 and 4096 are stored exactly."""
    _round_trips(rig, {0, 1} | {size + d for size in (512, 4096, 8192) for d in (-1, 0, 1)})


@check(needs_storage=False)
def sizes_around_blocks(rig: WriterHarness) -> None:
    """Files around one block and around several are stored exactly."""
    block = getattr(rig.writer.options, "block_size", rig.block_size)
    sizes = {n * block + d for n in (1, 2, 5) for d in (-1, 0, 1)}
    _round_trips(rig, {size for size in sizes if size <= _MOST})


@check()
def longer_file_replaced(rig: WriterHarness) -> None:
    """Of a longer file that is overwritten nothing stays."""
    rig.put("file", content(3 * rig.block_size // 2 + 5, 1).tobytes())
    rig.expect_round_trip(rig.image("file", content(4099)), content(4099))
    rig.expect_round_trip(rig.image("file"), content(0))


@check()
def shorter_file_replaced(rig: WriterHarness) -> None:
    """A shorter file that is overwritten grows to the new size."""
    data = content(rig.block_size + 513)
    rig.put("file", b"old")
    rig.expect_round_trip(rig.image("file", data), data)


@check()
def nested_paths(rig: WriterHarness) -> None:
    """Directories in an image's path are made, and may be there already."""
    for name in ("a/b/c/file", "a/b/other", "a/b/c/third"):
        rig.expect_round_trip(rig.image(name, content(777)), content(777))


@check()
def odd_names(rig: WriterHarness) -> None:
    """Names with spaces, dots and letters beyond ASCII are names as any other."""
    for name in ("with space.bin", ".hidden", "poids-été.pt", "x" * 120, "a..b/-rf"):
        rig.expect_round_trip(rig.image(name, content(4097)), content(4097))


@check(needs_storage=False, large=True)
def one_segment_over_2_gib(rig: WriterHarness) -> None:
    """One segment of more than 2 GiB is stored and read with no offset cut to 31 bits.

    The memory is zeros that were never touched but for marks at its ends and around 2 GiB.
    """
    memory = np.zeros(_OVER, dtype=np.uint8)
    marks = [(0, 4099), ((1 << 31) - 4099, (1 << 31) + 777), (_OVER - 3333, _OVER)]
    for seed, (start, stop) in enumerate(marks):
        memory[start:stop] = content(stop - start, seed)
    moved = rig.write(rig.image("file", memory), durable=False)
    expect(moved.bytes == _OVER, f"the Transfer tells of {moved.bytes} bytes, {_OVER} were moved")
    back = rig.image("file", np.zeros(_OVER, dtype=np.uint8))
    for start, stop in marks:
        rig.read(back, start=start, stop=stop)
        if rig.stores:
            (found,) = back.views(start, stop)
            expect_same(found, memory[start:stop], f"bytes [{start}, {stop})")
