"""Stream: the states of the file object, with a fake file that records calls."""

from __future__ import annotations

import contextlib
import errno
import gc
from collections.abc import Callable

import pytest

from iobench.errors import TransferError
from iobench.writers.image import Bytes
from iobench.writers.stream import Stream
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


class _Counted(Stream):
    """A stream into nothing."""

    def __init__(self, file: _File, fails: str = "") -> None:
        super().__init__(file, "counted", Meter())
        self._steps, self._count, self._fails = file.steps, 0, fails

    @property
    def _position(self) -> int:
        return self._count

    def _append(self, data: Bytes) -> None:
        if self._fails == "append":
            raise OSError(errno.ENOSPC, "No space left on device")
        self._count += len(data)

    def _drain(self) -> int:
        if self._fails == "drain":
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._count

    def _release(self) -> None:
        self._steps.append("release")


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


def test_dropped_after_flush_publishes() -> None:
    """The end of `torch.save(obj, writer.open(path))`."""
    stream = _Counted(file := _File())
    stream.write(b"abc")
    stream.flush()
    del stream
    gc.collect()
    assert file.steps == ["set_size 3", "sync", "publish", "release"]


def test_dropped_after_flush_and_more_does_not() -> None:
    """Bytes after the last flush are not durable, so nothing is published."""
    stream = _Counted(file := _File())
    stream.flush()
    stream.write(b"abc")
    with pytest.warns(ResourceWarning, match="/the/file: dropped without close"):
        stream = None
    assert file.steps == ["set_size 0", "sync", "release", "abandon"]


@pytest.mark.parametrize(
    ("act", "fails"),
    [
        (lambda stream: stream.write(b"x"), "append"),
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


def test_an_unclean_with_block_aborts() -> None:
    """An exception in the block propagates, and the file is removed."""
    with contextlib.suppress(KeyError), _Counted(file := _File()) as stream:
        stream.write(b"abc")
        raise KeyError
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
