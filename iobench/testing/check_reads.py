"""Checks: a read fills exactly what was asked for, from exactly the file that was meant."""

from __future__ import annotations

import contextlib
import errno
import os

import numpy as np

from iobench.errors import DataMismatchError, TransferError
from iobench.testing.check import check
from iobench.testing.content import content, content_at
from iobench.testing.expect import expect, expect_raises, expect_same
from iobench.testing.harness import WriterHarness


@check(needs_storage=False)
def partial_reads(rig: WriterHarness) -> None:
    """A read of [start, stop) fills exactly those bytes and touches no other."""
    block = rig.block_size
    size = 3 * block + 1000
    data = content(size)
    rig.write(rig.image("file", data))
    edges = (0, 1, 511, 512, 4095, 4097, block - 1, block, 2 * block + 1, size - 1, size)
    ranges = {(a, b) for a in edges for b in edges if a <= b <= a + block + 1} | {(1, size)}
    room = content_at(3, size, seed=9)
    before = room.copy()
    for start, stop in sorted(ranges):
        moved = rig.read(rig.image("file", room), start=start, stop=stop)
        expect(moved.bytes == stop - start, f"[{start}, {stop}): {moved.bytes} bytes told")
        if rig.stores:
            expect_same(room[start:stop], data[start:stop], f"[{start}, {stop})")
            expect_same(room[:start], before[:start], f"what is before [{start}, {stop})")
            expect_same(room[stop:], before[stop:], f"what is after [{start}, {stop})")
        room[start:stop] = before[start:stop]


@check()
def partial_reads_into_segments(rig: WriterHarness) -> None:
    """A partial read that starts and stops within segments leaves their other bytes alone."""
    data = content(40_000)
    rig.write(rig.image("file", data))
    pieces = [np.zeros(length, dtype=np.uint8) for length in (9_999, 1, 20_000, 10_000)]
    rig.read(rig.image("file", *pieces), start=9_000, stop=30_500)
    wanted = np.zeros(40_000, dtype=np.uint8)
    wanted[9_000:30_500] = data[9_000:30_500]
    expect_same(np.concatenate(pieces), wanted, "[9000, 30500) of four segments")


@check(needs_storage=False)
def ranges_outside_refused(rig: WriterHarness) -> None:
    """A range that is not within the image is refused before anything is read."""
    rig.write(rig.image("file", content(100)))
    for start, stop in ((-1, 10), (5, 4), (0, 101), (101, 101)):
        expect_raises(ValueError, rig.read, rig.image("file", content(100)), start=start, stop=stop)


@check()
def another_size_is_a_mismatch(rig: WriterHarness) -> None:
    """A file longer or shorter than the image raises DataMismatchError, an empty one too."""
    for stored, wanted in ((4096, 4097), (4097, 4096), (0, 1), (1, 0), (5000, 8192)):
        rig.write(rig.image("file", content(stored)))
        image = rig.image("file", content(wanted))
        error = expect_raises(DataMismatchError, rig.read, image)
        expect(
            str(stored) in str(error) and str(wanted) in str(error),
            f"the message names not both sizes, {stored} and {wanted}: {error}",
        )


@check()
def opened_to_look_into(rig: WriterHarness) -> None:
    """`open_source` reads and seeks in a stored file, as formats do; ENOENT where there is none."""
    data = content(rig.block_size + 777)
    rig.write(rig.image("file", data))
    with contextlib.closing(rig.writer.open_source(rig.place.locate("file"))) as source:
        expect(source.seek(0, os.SEEK_END) == len(data), "seek to the end tells another size")
        expect_same(source.read(10), b"", "read at the end")
        for start, size in ((0, 8), (len(data) - 30, 100), (rig.block_size - 3, 500), (1, 0)):
            expect(source.seek(start) == start == source.tell(), f"tell() after seek({start})")
            wanted = data[start : start + size]
            expect_same(source.read(size), wanted, f"{size} bytes at {start}")
            expect(source.tell() == start + len(wanted), "tell() after read")
        places = [5, len(data) - 4, 5, rig.block_size]
        for start, found in zip(places, source.read_at(places, 16), strict=True):
            expect_same(found, data[start : start + 16], f"read_at {start}")
        source.seek(0)
        expect_same(source.read(), data, "the whole file")
    error = expect_raises(TransferError, rig.writer.open_source, rig.place.locate("no such file"))
    expect(error.errno == errno.ENOENT, f"errno is {error.errno}, not ENOENT: {error}")


@check()
def missing_file(rig: WriterHarness) -> None:
    """A file that is not there raises TransferError with ENOENT and its name."""
    error = expect_raises(TransferError, rig.read, rig.image("no/such file", content(10)))
    expect(error.errno == errno.ENOENT, f"errno is {error.errno}, not ENOENT: {error}")
    expect("no/such file" in str(error), f"the message does not name the file: {error}")
