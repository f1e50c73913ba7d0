"""Checks: a stream gives the same file as a write, and only when nothing went wrong."""

from __future__ import annotations

import gc
import io
import random
import warnings

from iobench.testing.check import check
from iobench.testing.content import content
from iobench.testing.expect import expect, expect_raises
from iobench.testing.harness import WriterHarness


class _TroubleError(Exception):
    pass


def _pieces(size: int, largest: int, seed: int) -> list[tuple[int, int]]:
    """Ranges that cover `size` bytes, most of them small, some of several blocks."""
    rng = random.Random(seed)
    found, start = [], 0
    while start < size:
        length = rng.choice((1, rng.randint(1, 700), 4096, rng.randint(1, largest)))
        found.append((start, min(start + length, size)))
        start += length
    return found


@check(needs_storage=False)
def stream_equals_write(rig: WriterHarness) -> None:
    """However a serializer cuts its writes, the file is what `write` of the same bytes gives."""
    block = rig.block_size
    for seed, size in enumerate((0, 1, 4095, block, block + 1, 3 * block - 1, 5 * block + 513)):
        data = content(size, seed)
        with rig.open("file") as stream:
            for start, stop in _pieces(size, 3 * block, seed):
                taken = stream.write(data[start:stop])
                expect(taken == stop - start, f"write took {taken} of {stop - start} bytes")
                expect(stream.tell() == stop, f"tell() is {stream.tell()} after {stop} bytes")
        rig.expect_stored("file", data)


@check(needs_storage=False)
def size_is_a_hint(rig: WriterHarness) -> None:
    """`open(size=...)` only reserves: a file that comes out shorter or longer is exact."""
    for announced in (0, 1, 9_999, 10_000, 10_001, 3 * rig.block_size):
        with rig.open("file", size=announced) as stream:
            stream.write(content(10_000))
        rig.expect_stored("file", content(10_000))


@check(needs_storage=False)
def stream_is_a_binary_file(rig: WriterHarness) -> None:
    """A stream is an io object for writing: any buffer is taken whole, text is refused."""
    with rig.open("file") as stream:
        expect(isinstance(stream, io.IOBase), f"{type(stream).__name__} is no io.IOBase")
        expect(stream.writable() and not stream.readable() and not stream.seekable(), "its modes")
        expect(not stream.closed, "it is closed at once")
        for data in (b"ab", bytearray(b"cd"), memoryview(b"ef"), b""):
            expect(stream.write(data) == len(data), f"{data!r} was not taken whole")
    expect(stream.closed, "it is open after its with-block")
    expect_raises(ValueError, stream.write, b"x")
    stream.close()
    rig.expect_stored("file", b"abcdef")


@check(needs_storage=False)
def text_refused(rig: WriterHarness) -> None:
    """Text written to a stream raises TypeError, and the half-made file is not published."""
    stream = rig.open("file")
    expect_raises(TypeError, stream.write, "text")
    stream.abort()
    rig.expect_nothing("file")


@check()
def nothing_before_close(rig: WriterHarness) -> None:
    """Until a stream is closed its name holds what it held before, after a flush too."""
    rig.put("old", b"before")
    for name, before in (("new", None), ("old", b"before")):
        stream = rig.open(name)
        stream.write(content(rig.block_size + 5))
        stream.flush()
        expect(rig.place.stored(name) == before, f"{name}: changed before close()")
        stream.close()
        rig.expect_stored(name, content(rig.block_size + 5))


@check()
def buffers_may_change_at_once(rig: WriterHarness) -> None:
    """What was given to `write` may be overwritten as soon as it returns."""
    block = rig.block_size
    data = content(6 * block + 100)
    room = bytearray(block // 2 + 77)
    with rig.open("file") as stream:
        for start in range(0, len(data), len(room)):
            part = data[start : start + len(room)].tobytes()
            room[: len(part)] = part
            stream.write(memoryview(room)[: len(part)])
            room[:] = bytes(len(room))
    rig.expect_stored("file", data)


@check(needs_storage=False)
def writes_after_flush(rig: WriterHarness) -> None:
    """Writing goes on after a flush, at any place within a block, and after several."""
    block = rig.block_size
    data = content(3 * block + 700)
    with rig.open("file") as stream:
        start = 0
        for length in (1, 4095, 1, 511, block, block - 3, len(data)):
            stream.write(data[start : start + length])
            stream.flush()
            stream.flush()
            start += length
    rig.expect_stored("file", data)


@check()
def exception_publishes_nothing(rig: WriterHarness) -> None:
    """A with-block that is left by an exception leaves the name as it was."""

    def save() -> None:
        with rig.open("file") as stream:
            stream.write(content(2 * rig.block_size + 1))
            stream.flush()
            raise _TroubleError

    expect_raises(_TroubleError, save)
    rig.expect_nothing("file")
    rig.put("file", b"before")
    expect_raises(_TroubleError, save)
    rig.expect_stored("file", b"before")


@check()
def close_in_finally_publishes_nothing(rig: WriterHarness) -> None:
    """close() in a `finally`, while an exception is on its way, publishes nothing and says so."""

    def save() -> None:
        stream = rig.open("file")
        try:
            stream.write(content(rig.block_size + 1))
            raise _TroubleError
        finally:
            stream.close()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        expect_raises(_TroubleError, save)
    expect(
        any(issubclass(warning.category, RuntimeWarning) for warning in told),
        "close() that publishes nothing must warn with a RuntimeWarning",
    )
    rig.expect_nothing("file")


@check()
def saved_while_handling(rig: WriterHarness) -> None:
    """A checkpoint that is saved in an `except` block, as the last act of a job, is published."""
    try:
        raise _TroubleError
    except _TroubleError:
        with rig.open("with") as stream:
            stream.write(content(5000))
        by_hand = rig.open("by hand")
        by_hand.write(content(5000))
        by_hand.close()
        later = rig.open("later")
        later.write(content(5000))
    later.close()
    before = rig.open("before")
    try:
        raise _TroubleError
    except _TroubleError:
        with before:
            before.write(content(5000))
    for name in ("with", "by hand", "later", "before"):
        rig.expect_stored(name, content(5000))


@check()
def abort_removes(rig: WriterHarness) -> None:
    """abort() removes what was written, may be repeated, and closes the stream."""
    for written in (0, 10, 2 * rig.block_size + 9):
        stream = rig.open("file")
        stream.write(content(written))
        stream.abort()
        stream.abort()
        stream.close()
        expect(stream.closed, "it is open after abort()")
        expect(stream.transfer is None, "an aborted stream tells of a Transfer")
        rig.expect_nothing("file")


@check()
def dropped_unflushed_warns(rig: WriterHarness) -> None:
    """A stream that is dropped with neither flush nor close publishes nothing and says so."""
    for written in (10, 3 * rig.block_size + 5):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            stream = rig.open("file")
            stream.write(content(written))
            del stream
            gc.collect()
        kinds = [warning.category for warning in caught]
        expect(ResourceWarning in kinds, f"no ResourceWarning after {written} bytes, but {kinds}")
        rig.expect_nothing("file")


@check()
def two_streams_to_one_name(rig: WriterHarness) -> None:
    """Two streams to one name do not mix: the one closed last has the name, whole."""
    block = rig.block_size
    first, second = rig.open("file"), rig.open("file")
    for start in range(0, 3 * block, block // 2 + 1):
        first.write(content(3 * block, 1)[start : start + block // 2 + 1])
        second.write(content(3 * block, 2)[start : start + block // 2 + 1])
    second.close()
    rig.expect_stored("file", content(3 * block, 2))
    first.close()
    rig.expect_stored("file", content(3 * block, 1))
