"""Checks: a read fills exactly the requested bytes, from exactly the named file."""

from __future__ import annotations

import contextlib
import errno
import os

import numpy as np

from iobench.errors import DataMismatchError, TransferError
from iobench.testing.check import check
from iobench.testing.content import content, content_at
from iobench.testing.harness import WriterHarness, expect, expect_raises, expect_same
from iobench.writers.image import Bytes, FileImage


@check(needs_storage=False)
def partial_reads(harness: WriterHarness) -> None:
    """A read of [start, stop) fills exactly those bytes and touches no other."""
    block = harness.block_size
    size = 3 * block + 1000
    data = content(size)
    harness.write(harness.image("file", data))
    edges = (0, 1, 511, 512, 4095, 4097, block - 1, block, 2 * block + 1, size - 1, size)
    ranges = {(a, b) for a in edges for b in edges if a <= b <= a + block + 1} | {(1, size)}
    room = content_at(3, size, seed=9)
    before = room.copy()
    for start, stop in sorted(ranges):
        moved = harness.read(harness.image("file", room), start=start, stop=stop)
        expect(moved.bytes == stop - start, f"[{start}, {stop}): Transfer of {moved.bytes} bytes")
        if harness.stores:
            expect_same(room[start:stop], data[start:stop], f"[{start}, {stop})")
            expect_same(room[:start], before[:start], f"what is before [{start}, {stop})")
            expect_same(room[stop:], before[stop:], f"what is after [{start}, {stop})")
        room[start:stop] = before[start:stop]


@check(needs_storage=False)
def reads_of_ranges(harness: WriterHarness) -> None:
    """Exactly those bytes are filled, whether ranges share a block or leave one out, by
    `read_ranges` and by `read_many` of several files. Ranges outside the image are refused.
    """
    block = harness.block_size
    size = 6 * block + 1000
    data, before = content(size), content_at(3, size, seed=9)
    ranges = [
        *((1, 5), (5, 5), (7, 300), (block - 1, block + 1)),
        *((2 * block + 7, 4 * block), (size - 1, size)),
    ]
    wanted, count = before.copy(), sum(stop - start for start, stop in ranges)
    for start, stop in ranges:
        wanted[start:stop] = data[start:stop]
    writer, target = harness.writer, harness.test_target.target
    for names in (["file"], ["file", "other"]):
        rooms = {name: before.copy() for name in names}
        images = [harness.image(name, room) for name, room in rooms.items()]
        for image in images:
            harness.write(harness.image(image.path, data))
        if len(images) == 1:
            moved = writer.read_ranges(images[0], target, ranges)
        else:
            moved = writer.read_many([(image, ranges) for image in images], target)
        asked = (len(names), count * len(names))
        expect((moved.files, moved.bytes) == asked, f"Transfer of {moved.bytes} bytes, not {asked}")
        for name, room in rooms.items():
            if harness.stores:
                expect_same(room, wanted, f"{name} with {ranges}")
    image = images[0]
    for refused in ([(5, 6), (4, 5)], [(0, 10), (9, 12)], [(0, size + 1)]):
        expect_raises(ValueError, harness.writer.read_ranges, image, target, refused)
    for start, stop in ((-1, 10), (5, 4), (0, size + 1), (size + 1, size + 1)):
        expect_raises(ValueError, harness.read, image, start=start, stop=stop)


class _Watched(FileImage):
    """Compares bytes with `wanted` when a read reports them."""

    wanted: Bytes
    reported: list[tuple[int, int, bool]]

    def filled(self, start: int, stop: int) -> None:
        (found,) = self.views(start, stop)
        self.reported.append((start, stop, np.array_equal(found, self.wanted[start:stop])))


@check()
def reported_bytes(harness: WriterHarness) -> None:
    """Bytes that a read reports as filled are there then, and none is reported twice.

    A writer need not report anything.
    """
    size = 5 * harness.block_size + 1000
    data = content(size)
    harness.write(harness.image("file", data))
    for start, stop in ((0, size), (4097, size - 5)):
        image = _Watched.of("file", [np.zeros(size, dtype=np.uint8)])
        image.wanted, image.reported = data, []
        harness.read(image, start=start, stop=stop)
        end = start
        for begin, until, right in sorted(image.reported):
            expect(right, f"[{begin}, {until}) was reported before it was there")
            expect(end <= begin <= until <= stop, f"[{begin}, {until}) is outside or again")
            end = until


@check()
def another_size_is_a_mismatch(harness: WriterHarness) -> None:
    """A file longer or shorter than the image raises DataMismatchError, an empty one too."""
    for stored, wanted in ((4096, 4097), (4097, 4096), (0, 1), (1, 0), (5000, 8192)):
        harness.write(harness.image("file", content(stored)))
        image = harness.image("file", content(wanted))
        error = expect_raises(DataMismatchError, harness.read, image)
        expect(
            str(stored) in str(error) and str(wanted) in str(error),
            f"the message does not name both sizes, {stored} and {wanted}: {error}",
        )


@check()
def opened_to_look_into(harness: WriterHarness) -> None:
    """`open_source` reads and seeks in a stored file, and raises ENOENT for a missing one."""
    data = content(harness.block_size + 777)
    harness.write(harness.image("file", data))
    with contextlib.closing(
        harness.writer.open_source(harness.test_target.locate("file"))
    ) as source:
        expect(source.seek(0, os.SEEK_END) == len(data), "seek to the end returns another size")
        expect_same(source.read(10), b"", "read at the end")
        for start, size in ((0, 8), (len(data) - 30, 100), (harness.block_size - 3, 500), (1, 0)):
            expect(source.seek(start) == start == source.tell(), f"tell() after seek({start})")
            wanted = data[start : start + size]
            expect_same(source.read(size), wanted, f"{size} bytes at {start}")
            expect(source.tell() == start + len(wanted), "tell() after read")
        offsets = [5, len(data) - 4, 5, harness.block_size]
        for start, found in zip(offsets, source.read_at(offsets, 16), strict=True):
            expect_same(found, data[start : start + 16], f"read_at {start}")
        source.seek(0)
        expect_same(source.read(), data, "the whole file")
    error = expect_raises(
        TransferError, harness.writer.open_source, harness.test_target.locate("no such file")
    )
    expect(error.errno == errno.ENOENT, f"errno is {error.errno}, not ENOENT: {error}")


@check()
def missing_file(harness: WriterHarness) -> None:
    """A missing file raises TransferError with ENOENT and its name."""
    error = expect_raises(TransferError, harness.read, harness.image("no/such file", content(10)))
    expect(error.errno == errno.ENOENT, f"errno is {error.errno}, not ENOENT: {error}")
    expect("no/such file" in str(error), f"the message does not name the file: {error}")
