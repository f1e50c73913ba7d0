"""BlockStream: the states of the file object, with a fake file that records calls."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import struct
import threading
import zipfile
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from iobench.errors import TransferError
from iobench.writers import stream as stream_module
from iobench.writers.image import Bytes
from iobench.writers.stream import BlockStream, PlainSink, Sink
from iobench.writers.transfer import Meter


class _File:
    """A new file that records its calls and fails where a test says so."""

    path = "/the/file"

    def __init__(self, fails: str = "") -> None:
        self.steps: list[str] = []
        self._fails = fails

    def _step(self, name: str) -> None:
        self.steps.append(name)
        if self._fails == name:
            raise OSError(errno.EIO, "I/O error")

    def set_size(self, size_bytes: int) -> None:
        self._step(f"set_size {size_bytes}")

    def sync(self) -> None:
        self._step("sync")

    def publish(self, *, sync_names: bool) -> None:
        self._step("publish")

    def abandon(self) -> None:
        self._step("abandon")


class _Sink(Sink):
    """Blocks of 4 bytes; records its calls, and fails where a test says so."""

    block_size = 4

    def __init__(self, steps: list[str], fails: str = "") -> None:
        self.puts: list[tuple[int, bytes]] = []
        self.drains: list[tuple[int, bytes, bool]] = []
        self._steps, self._fails = steps, fails

    def block(self) -> Bytes:
        return np.empty(self.block_size, dtype=np.uint8)

    def put(self, block: Bytes, offset: int) -> None:
        if self._fails == "put":
            raise OSError(errno.ENOSPC, "No space left on device")
        self.puts.append((offset, block.tobytes()))

    def drain(self, block: Bytes, filled: int, offset: int, *, last: bool) -> None:
        if self._fails == "drain":
            raise OSError(errno.ENOSPC, "No space left on device")
        self.drains.append((offset, block[:filled].tobytes(), last))

    def release(self, block: Bytes, *, failed: bool) -> None:
        self._steps.append("release")


class _Counted(BlockStream):
    """A stream into nothing."""

    def __init__(self, file: _File, fails: str = "") -> None:
        self.sink = _Sink(file.steps, fails)
        super().__init__(file, "counted", Meter(), self.sink)


def test_full_blocks_go_to_the_sink() -> None:
    """A full block is passed on at once, and a flush writes the rest as often as it must."""
    stream = _Counted(_File())
    for data in (b"a", b"bcd", b"efghij", b""):
        stream.write(data)
    assert stream.sink.puts == [(0, b"abcd"), (4, b"efgh")]
    stream.flush()
    assert stream.tell() == 10
    stream.write(b"kl")
    stream.close()
    assert stream.sink.puts == [(0, b"abcd"), (4, b"efgh"), (8, b"ijkl")]
    assert stream.sink.drains == [(8, b"ij", False), (12, b"", True)]


@pytest.mark.parametrize("entered", [False, True])
def test_a_sink_that_keeps_the_last_block(entered: bool) -> None:
    """A full block waits for the next byte. In a `with`, it is stored by close and not before."""
    stream = _Counted(_File())
    stream.sink.keeps_last = True
    with stream if entered else contextlib.nullcontext():
        stream.write(b"abcdefgh")
        assert stream.sink.puts == [(0, b"abcd")]
        stream.flush()
        assert stream.sink.drains == [(4, b"" if entered else b"efgh", False)]
    stream.close()
    assert stream.sink.drains[1:] == ([(4, b"efgh", True)] if entered else [])


def test_a_sink_in_place_gets_large_data_uncut() -> None:
    """Small writes are collected; one that does not fit follows them as it is."""
    stream = _Counted(_File())
    stream.sink.in_place = True
    for data in (b"a", b"bc", b"defghij", b"k"):
        stream.write(data)
    assert stream.sink.puts == [(0, b"abc"), (3, b"defghij")]
    stream.close()
    assert stream.sink.puts[2:] == [(10, b"k")]
    assert stream.sink.drains == [(11, b"", True)]


def test_a_plain_sink_cuts_large_data() -> None:
    """Each call has at most `largest` bytes, and `finish` is called after the last one."""
    seen: list[object] = []
    sink = PlainSink(
        lambda views, offset: seen.append((offset, views[0].tobytes())), 4, lambda: seen.append(0)
    )
    sink.put(np.frombuffer(b"abcdefghij", dtype=np.uint8), 100)
    sink.drain(sink.block(), 0, 110, last=True)
    assert seen == [(100, b"abcd"), (104, b"efgh"), (108, b"ij"), 0]


def test_close_publishes_once() -> None:
    """Size, sync, name, in this order; a second close does nothing."""
    stream = _Counted(file := _File())
    stream.write(b"abc")
    stream.close()
    stream.close()
    assert file.steps == ["set_size 3", "sync", "publish", "release"]
    assert stream.transfer is not None
    assert (stream.transfer.bytes, stream.transfer.durable) == (3, True)


def test_a_flushed_stream_is_not_synced_again() -> None:
    """close after flush only gives the name, unless something was written in between."""
    stream = _Counted(file := _File())
    stream.write(b"abc")
    stream.flush()
    stream.close()
    assert file.steps == ["set_size 3", "sync", "publish", "release"]
    stream = _Counted(file := _File())
    stream.flush()
    stream.write(b"abc")
    stream.close()
    assert file.steps == ["set_size 0", "sync", "set_size 3", "sync", "publish", "release"]


def _published(file: _File) -> bool:
    gc.collect()
    assert ("publish" in file.steps) != ("abandon" in file.steps)
    return "publish" in file.steps


def test_the_end_of_a_large_zip() -> None:
    """Beyond 4 GiB the last record has a zip64 field. Sizes do not fit into the old end record."""
    start, length = (4 << 30) + 1000, 507
    stop = start + length
    entry = b"archive/.data/serialization_id" + struct.pack("<2HQ", 1, 8, start - 100)
    end = (
        struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 798, 45, 0, 0, 7, 7, length, start)
        + struct.pack("<4sLQL", b"PK\x06\x07", 0, stop, 1)
        + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 7, 7, length, 0xFFFFFFFF, 0)
    )
    assert stream_module._ends_torch_zip(entry + end, stop + len(end))
    assert not stream_module._ends_torch_zip(entry + end, stop + len(end) + 1)
    assert not stream_module._ends_torch_zip(b"x" * len(entry) + end, stop + len(end))


def test_no_end_but_the_exact_one() -> None:
    """A zip whose end is cut, changed or followed by more bytes is not complete."""
    zipped = io.BytesIO()
    torch.save([torch.zeros(100)], zipped)
    data = zipped.getvalue()
    whole = stream_module._ends_torch_zip
    assert whole(data, len(data))
    for cut in (1, 22, 42, 98, 120, len(data)):
        assert not whole(data[:-cut], len(data) - cut)
    assert not whole(data + b"x", len(data) + 1)
    for at in range(len(data) - 98, len(data)):
        if at not in range(len(data) - 86, len(data) - 82):  # the versions
            changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            assert not whole(changed, len(data)), len(data) - at


def _flushed_midway(stream: _Counted) -> None:
    stream.write(b"one part")
    stream.flush()


def _legacy_torch_file(stream: _Counted) -> None:
    torch.save([torch.zeros(9)], stream, _use_new_zipfile_serialization=False)


def _more_after_the_zip(stream: _Counted) -> None:
    torch.save([torch.zeros(9)], stream)
    stream.write(b"and more")
    stream.flush()


def _two_zips(stream: _Counted) -> None:
    stream.write(b"a header")
    torch.save([torch.zeros(9)], stream)


def _zip_in_progress(stream: _Counted) -> None:
    """A ZipFile that is dropped writes the end of the zip, and flushes."""
    archive = zipfile.ZipFile(stream, "w")
    archive.writestr("archive/data.pkl", b"the first of several")


@pytest.mark.parametrize(
    "save",
    [_flushed_midway, _legacy_torch_file, _more_after_the_zip, _two_zips, _zip_in_progress],
)
@pytest.mark.parametrize(
    "leave",
    ["returns", "raises", "interrupted", "exits", "generator", "thread"],
)
def test_dropped_without_close(save: Callable, leave: str) -> None:
    """However the last reference goes, a flush publishes nothing: it may come between two parts."""
    file = _File()
    errors = {"raises": KeyError, "interrupted": KeyboardInterrupt, "exits": SystemExit}

    def run() -> None:
        stream = _Counted(file)
        save(stream)
        if leave in errors:
            raise errors[leave]

    def run_generator() -> Iterator[None]:
        stream = _Counted(file)
        save(stream)
        yield
        stream.close()

    def run_and_leave() -> None:
        if leave == "generator":
            next(run_generator())
        elif leave == "thread":
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        else:
            with contextlib.suppress(*errors.values()):
                run()
        gc.collect()

    with pytest.warns(RuntimeWarning, match=r"/the/file: dropped without close\(\)"):
        run_and_leave()
    assert not _published(file)


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("text", [False, True])
def test_a_dropped_wrapper(text: bool, complete: bool) -> None:
    """io's wrappers close the stream when they are dropped, which is not a close by the user."""
    file = _File()

    def save() -> None:
        wrapper = io.BufferedWriter(_Counted(file))
        wrapper = io.TextIOWrapper(wrapper) if text else wrapper
        wrapper.write("one part" if text else b"one part")
        wrapper.flush()
        if not complete:
            raise KeyError
        wrapper.close()

    def save_and_leave() -> None:
        with contextlib.suppress(KeyError):
            save()
        gc.collect()

    if complete:
        save_and_leave()
    else:
        with pytest.warns(RuntimeWarning, match="dropped without"):
            save_and_leave()
    assert _published(file) == complete


def test_torch_save_that_fails() -> None:
    """torch ends the zip of a save that fails too. A later flush does not make that complete."""
    file = _File()

    def save() -> None:
        stream = _Counted(file)
        with contextlib.suppress(Exception):
            torch.save([torch.zeros(9), lambda: None], stream)
        stream.flush()

    with pytest.warns(RuntimeWarning, match="dropped without"):
        save()
    assert not _published(file)


@pytest.mark.parametrize(
    ("act", "fails"),
    [
        (lambda stream: stream.write(b"1234"), "put"),
        (lambda stream: stream.flush(), "drain"),
    ],
)
def test_after_a_failure_nothing_is_published(act: Callable, fails: str) -> None:
    """The first failure is raised as TransferError; later calls repeat that; close removes."""
    stream = _Counted(file := _File(), fails)
    with pytest.raises(TransferError, match="No space left") as caught:
        act(stream)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "/the/file")
    with pytest.raises(TransferError, match="failed before"):
        stream.write(b"y")
    with pytest.raises(TransferError, match="failed before"):
        stream.flush()
    with pytest.raises(TransferError, match="failed before"):
        stream.close()
    assert file.steps == ["release", "abandon"]
    assert stream.closed


@pytest.mark.parametrize("fails", ["set_size 0", "sync", "publish"])
def test_a_failing_close_raises(fails: str) -> None:
    """If any step of close fails, it raises, the file is removed and the stream closed."""
    stream = _Counted(file := _File(fails))
    with pytest.raises(OSError, match="I/O error"):
        stream.close()
    assert file.steps[-2:] == ["release", "abandon"]
    assert stream.closed
    assert stream.transfer is None


def test_a_failing_abandon_still_closes() -> None:
    """Threads and memory are released once, even if the file cannot be removed."""
    stream = _Counted(file := _File("abandon"))
    with pytest.raises(OSError, match="I/O error"):
        stream.abort()
    assert stream.closed
    del stream
    gc.collect()
    assert file.steps == ["release", "abandon"]


def test_torch_flushes_while_failing() -> None:
    """The clean-up of torch.save flushes while an error propagates: that syncs nothing."""
    stream = _Counted(file := _File())
    with contextlib.suppress(KeyError):
        try:
            stream.write(b"abc")
            raise KeyError
        finally:
            stream.flush()
    stream.abort()
    assert file.steps == ["release", "abandon"]


def test_closed_streams_refuse() -> None:
    """A closed stream takes nothing and cannot be entered; flush is harmless, as in io."""
    stream = _Counted(_File())
    stream.close()
    stream.flush()
    with pytest.raises(ValueError, match="closed"):
        stream.write(b"")
    with pytest.raises(ValueError, match="closed"):
        stream.__enter__()


def test_a_constructor_that_fails_is_quiet() -> None:
    """A stream whose constructor fails does not warn and removes nothing."""

    class Broken(_Counted):
        def __init__(self) -> None:
            raise KeyError

    with pytest.raises(KeyError):
        Broken()
    gc.collect()


def test_ctrl_c_once_the_file_is_published() -> None:
    """An interrupt while threads end is raised; the file is published once, with its Transfer."""
    stream = _Counted(file := _File())
    stream._release = _interrupted
    stream.write(b"abc")
    with pytest.raises(KeyboardInterrupt):
        stream.close()
    assert stream.closed
    assert stream.transfer is not None
    del stream
    gc.collect()
    assert file.steps == ["set_size 3", "sync", "publish"]


def _interrupted() -> None:
    raise KeyboardInterrupt
