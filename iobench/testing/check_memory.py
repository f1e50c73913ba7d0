"""Checks: segment lengths and memory addresses make no difference."""

from __future__ import annotations

import mmap
from itertools import cycle, islice

import numpy as np

from iobench.testing.check import check
from iobench.testing.content import content, content_at, cut, empty_like
from iobench.testing.harness import WriterHarness, expect_raises, expect_same


@check(needs_storage=False)
def many_tiny_segments(harness: WriterHarness) -> None:
    """More segments than one system call takes (IOV_MAX is 1024) are stored in order."""
    lengths = list(islice(cycle((1, 2, 3, 5, 7, 64)), 2500))
    data = content(sum(lengths))
    harness.expect_round_trip(harness.image("file", *cut(data, lengths)), data)


@check(needs_storage=False)
def empty_segments(harness: WriterHarness) -> None:
    """Segments of no bytes, at either end and in a row, change nothing."""
    data = content(2 * 4096 + 1)
    pieces = cut(data, (0, 0, 4096, 0, 4096, 0, 0, 1, 0))
    harness.expect_round_trip(harness.image("file", *pieces, b"", b""), data)
    harness.expect_round_trip(harness.image("file", b"", b""), content(0))


@check(needs_storage=False)
def any_address(harness: WriterHarness) -> None:
    """Memory at any address and of any length is stored and filled, also where it is aligned as
    direct I/O requires, which may skip a copy.
    """
    block = harness.block_size
    odd = [(at, 4095 - at, block + 4096 + at) for at in (0, 1, 64, 511, 512, 4095)]
    for stored, room, size in (*odd, (0, 0, 4096), (0, 0, 2 * block), (0, 0, block + 512)):
        data = content_at(stored, size, stored)
        harness.expect_round_trip(harness.image("file", data), data)
        if harness.stores:
            back = content_at(room, size, stored + 1)
            harness.read(harness.image("file", back))
            expect_same(back, data, f"read back to address {room} of a page")


@check()
def cut_anew_for_reading(harness: WriterHarness) -> None:
    """A file is read into segments of other lengths than it was written from. A part of it leaves
    the other bytes of these segments unchanged.
    """
    size = 3 * harness.block_size + 4097
    data = content(size)
    lengths = islice(cycle((4096, 1, 8191, 513)), size // 4000)
    harness.write(harness.image("file", *cut(data, lengths)))
    for start, stop in ((0, size), (9_000, size - 7_000)):
        pieces = cut(np.zeros(size, dtype=np.uint8), (1, 4095, 4096, size // 2, 3))
        harness.read(harness.image("file", *pieces), start=start, stop=stop)
        wanted = np.zeros(size, dtype=np.uint8)
        wanted[start:stop] = data[start:stop]
        expect_same(np.concatenate(pieces), wanted, f"[{start}, {stop}) of other segments")


@check(needs_storage=False)
def every_kind_of_buffer(harness: WriterHarness) -> None:
    """bytes, bytearray, memoryview, numpy arrays of any dtype and mmap are all memory."""
    anonymous = mmap.mmap(-1, 4096)
    anonymous.write(content(4096).tobytes())
    kinds = (
        b"read-only bytes",
        bytearray(b"bytearray"),
        memoryview(b"a view of bytes")[3:9],
        np.arange(35, dtype=np.float64).reshape(5, 7),
        np.array(7, dtype=np.int32),
        anonymous,
    )
    wanted = b"".join(
        kind.tobytes() if isinstance(kind, np.ndarray) else bytes(kind) for kind in kinds
    )
    image = harness.image("file", *kinds)
    harness.write(image)
    harness.expect_stored("file", wanted)
    back = empty_like(image)
    harness.read(back)
    if harness.stores:
        expect_same(np.concatenate(back.views(0, len(wanted))), wanted, "read back")


@check(needs_storage=False)
def read_only_memory_refused(harness: WriterHarness) -> None:
    """A restore into read-only memory is refused, and the memory is unchanged."""
    kept = bytes(4096)
    harness.write(harness.image("file", content(4096)))
    expect_raises(ValueError, harness.read, harness.image("file", kept))
    expect_same(kept, bytes(4096), "the read-only memory")
