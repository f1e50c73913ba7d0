"""Checks: a stream publishes the same file as a write, and nothing after a failure."""

from __future__ import annotations

import gc
import io
import random
import warnings
from collections.abc import Callable
from itertools import product

from iobench.testing.check import check
from iobench.testing.content import content
from iobench.testing.harness import WriterHarness, expect, expect_raises
from iobench.writers.stream import BlockStream


class _TroubleError(Exception):
    pass


def _pieces(size: int, largest: int, seed: int) -> list[tuple[int, int]]:
    """Return ranges that cover `size` bytes; most are small, some span several blocks."""
    rng = random.Random(seed)
    found, start = [], 0
    while start < size:
        length = rng.choice((1, rng.randint(1, 700), 4096, rng.randint(1, largest)))
        found.append((start, min(start + length, size)))
        start += length
    return found


@check(needs_storage=False)
def stream_equals_write(harness: WriterHarness) -> None:
    """Writes of any lengths to a stream give the same file as `write` of the same bytes, also where
    `open` was given another size, which is only a hint.
    """
    block = harness.block_size
    sizes = (0, 1, 4095, block, block + 1, 3 * block - 1, 5 * block + 513)
    announced: list[tuple[int, int | None]] = [(size, None) for size in sizes]
    announced += [(10_000, hint) for hint in (0, 1, 9_999, 10_000, 10_001, 3 * block)]
    for seed, (size, hint) in enumerate(announced):
        data = content(size, seed)
        with harness.open("file", hint) as stream:
            for start, stop in _pieces(size, 3 * block, seed):
                taken = stream.write(data[start:stop])
                expect(taken == stop - start, f"write took {taken} of {stop - start} bytes")
                expect(stream.tell() == stop, f"tell() is {stream.tell()} after {stop} bytes")
        harness.expect_stored("file", data)


@check(needs_storage=False)
def stream_is_a_binary_file(harness: WriterHarness) -> None:
    """A stream is an io object for writing: any buffer is taken whole, text is refused."""
    with harness.open("file") as stream:
        expect(isinstance(stream, io.IOBase), f"{type(stream).__name__} is not an io.IOBase")
        expect(stream.writable() and not stream.readable() and not stream.seekable(), "its modes")
        expect(not stream.closed, "it is closed at once")
        for data in (b"ab", bytearray(b"cd"), memoryview(b"ef"), b""):
            expect(stream.write(data) == len(data), f"{data!r} was not taken whole")
        expect_raises(TypeError, stream.write, "text")
    expect(stream.closed, "it is open after its with-block")
    expect_raises(ValueError, stream.write, b"x")
    stream.close()
    harness.expect_stored("file", b"abcdef")


@check()
def nothing_before_close(harness: WriterHarness) -> None:
    """Until a stream is closed, its name keeps the old content, even after a flush."""
    harness.put("old", b"before")
    for name, before in (("new", None), ("old", b"before")):
        stream = harness.open(name)
        stream.write(content(harness.block_size + 5))
        stream.flush()
        expect(harness.test_target.stored(name) == before, f"{name}: changed before close()")
        stream.close()
        harness.expect_stored(name, content(harness.block_size + 5))


@check()
def buffers_may_change_at_once(harness: WriterHarness) -> None:
    """The caller may overwrite a buffer as soon as `write` returns."""
    block = harness.block_size
    data = content(6 * block + 100)
    room = bytearray(block // 2 + 77)
    with harness.open("file") as stream:
        for start in range(0, len(data), len(room)):
            part = data[start : start + len(room)].tobytes()
            room[: len(part)] = part
            stream.write(memoryview(room)[: len(part)])
            room[:] = bytes(len(room))
    harness.expect_stored("file", data)


@check(needs_storage=False)
def writes_after_flush(harness: WriterHarness) -> None:
    """Writing continues after one or several flushes, at any offset within a block."""
    block = harness.block_size
    data = content(3 * block + 700)
    with harness.open("file") as stream:
        start = 0
        for length in (1, 4095, 1, 511, block, block - 3, len(data)):
            stream.write(data[start : start + length])
            stream.flush()
            stream.flush()
            start += length
    harness.expect_stored("file", data)


def _raise(_: BlockStream) -> None:
    raise _TroubleError


def _raise_in_with(stream: BlockStream) -> None:
    with stream:
        raise _TroubleError


def _raise_and_close(stream: BlockStream) -> None:
    try:
        raise _TroubleError
    finally:
        stream.close()


@check()
def failed_stream_publishes_nothing(harness: WriterHarness) -> None:
    """A save that fails, also after a flush, leaves the name unchanged: by an exception in a
    with-block, or before close() in a `finally`, or without close(). The last two warn.
    """
    ways = {
        _raise_in_with: None,
        _raise_and_close: "",
        _raise: "file: dropped without close()",
    }

    def save(end: Callable[[BlockStream], None], size: int, *, flush: bool) -> None:
        stream = harness.open("file")
        stream.write(content(size))
        if flush:
            stream.flush()  # a serializer may flush after each part
        end(stream)

    for before in (None, b"before"):
        if before is not None:
            harness.put("file", before)
        for size, flush, (end, text) in product(
            (10, 3 * harness.block_size + 5), (False, True), ways.items()
        ):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                expect_raises(_TroubleError, save, end, size, flush=flush)
                gc.collect()
            texts = [str(one.message) for one in caught if one.category is RuntimeWarning]
            expect(
                text is None or any(text in one for one in texts),
                f"{end.__name__}: no RuntimeWarning {text!r} after {size} bytes, but {texts}",
            )
            found = harness.test_target.stored("file")
            expect(found == before, f"{end.__name__}: published, {flush=}")
            harness.expect_no_leftovers()


@check()
def saved_while_handling(harness: WriterHarness) -> None:
    """A checkpoint saved in an `except` block, such as a job's last one, is published."""
    try:
        raise _TroubleError
    except _TroubleError:
        with harness.open("with") as stream:
            stream.write(content(5000))
        by_hand = harness.open("by hand")
        by_hand.write(content(5000))
        by_hand.close()
        later = harness.open("later")
        later.write(content(5000))
    later.close()
    before = harness.open("before")
    try:
        raise _TroubleError
    except _TroubleError:
        with before:
            before.write(content(5000))
    for name in ("with", "by hand", "later", "before"):
        harness.expect_stored(name, content(5000))


@check()
def abort_removes(harness: WriterHarness) -> None:
    """abort() removes the new file, may be repeated, and closes the stream."""
    for written in (0, 10, 2 * harness.block_size + 9):
        stream = harness.open("file")
        stream.write(content(written))
        stream.abort()
        stream.abort()
        stream.close()
        expect(stream.closed, "it is open after abort()")
        expect(stream.transfer is None, "an aborted stream has a Transfer")
        harness.expect_nothing("file")


@check()
def two_streams_to_one_name(harness: WriterHarness) -> None:
    """Two streams to one name do not mix: the file of the last one closed is there, whole."""
    block = harness.block_size
    first, second = harness.open("file"), harness.open("file")
    for start in range(0, 3 * block, block // 2 + 1):
        first.write(content(3 * block, 1)[start : start + block // 2 + 1])
        second.write(content(3 * block, 2)[start : start + block // 2 + 1])
    second.close()
    harness.expect_stored("file", content(3 * block, 2))
    first.close()
    harness.expect_stored("file", content(3 * block, 1))
