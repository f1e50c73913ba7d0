"""Completions that are short or fail, and Ctrl-C in the thread that waits for rings."""

import _thread
import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.saves import save

from iobench.errors import TransferError
from iobench.testing import content
from iobench.writers import file_writer
from iobench.writers.base import Writer
from iobench.writers.direct import engine
from iobench.writers.direct.ring import PyuringRing
from iobench.writers.image import FileImage
from iobench.writers.registry import make

_BLOCKS = 32
_DATA = content(_BLOCKS * 65536 - 100)


class _Meddler(PyuringRing):
    """A real ring; `meddle` changes its results before they are returned."""

    meddle: Callable[[int], int]

    def wait(self) -> tuple[int, int]:
        tag, count = super().wait()
        return tag, type(self).meddle(count)


_SETTINGS = {
    "uring": {"rings": 2, "iodepth": 4},
    "hybrid": {"iodepth": 4, "small_size": "16KiB", "paths": "direct"},
}


@pytest.fixture(params=_SETTINGS)
def writer(request: pytest.FixtureRequest, tmp_path: Path) -> Writer:
    """Small blocks, one or two rings; skip without io_uring."""
    writer = make(request.param, block_size="64KiB", **_SETTINGS[request.param])
    answer = writer.available(tmp_path)
    if not answer.ok or "io_uring" in answer.reason:
        pytest.skip(f"{answer.reason} {answer.remedy}")
    return writer


@pytest.fixture
def meddle(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[int], int]], None]]:
    """Pass the result of every completion through a function."""

    def begin(function: Callable[[int], int]) -> None:
        monkeypatch.setattr(_Meddler, "meddle", staticmethod(function), raising=False)
        monkeypatch.setattr(file_writer, "PyuringRing", _Meddler)

    return begin


class _Nth:
    """Changes the `nth` result, counted from 0 over all rings."""

    def __init__(self, nth: int, result: int) -> None:
        self._left, self._result, self._lock = nth, result, threading.Lock()

    def __call__(self, count: int) -> int:
        with self._lock:
            self._left -= 1
            return self._result if self._left == -1 else count


@pytest.mark.parametrize("how", ["write", "stream"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("nth", [0, 15, _BLOCKS - 2])
def test_a_failed_write(writer, names, meddle, tmp_path, how, number, nth) -> None:
    """The caller gets the completion's errno, no file is published, and the writer works again."""
    (tmp_path / "model").write_bytes(b"the last good one")
    meddle(_Nth(nth, -number))
    with pytest.raises(TransferError) as caught:
        save(writer, how, tmp_path, _DATA)
    assert (caught.value.errno, caught.value.filename) == (number, str(tmp_path / "model"))
    assert names(tmp_path) == {"model"}
    assert (tmp_path / "model").read_bytes() == b"the last good one"
    save(writer, how, tmp_path, _DATA)
    assert (tmp_path / "model").read_bytes() == _DATA.tobytes()


@pytest.mark.parametrize("how", ["write", "stream"])
def test_short_and_put_off(writer, meddle, tmp_path, how: str) -> None:
    """Short counts are continued; EAGAIN, EINTR and ECANCELED are retried and recorded."""
    turns = iter([4096, -errno.EAGAIN, 61440, -errno.EINTR, -errno.ECANCELED, 512 * 13])
    lock = threading.Lock()

    def changed(count: int) -> int:
        with lock:
            return min(count, next(turns, count))

    meddle(changed)
    save(writer, how, tmp_path, _DATA)
    assert (tmp_path / "model").read_bytes() == _DATA.tobytes()
    assert next(turns, None) is None


@pytest.mark.parametrize("nth", [0, 15, _BLOCKS - 2])
def test_a_failed_read(writer, meddle, tmp_path, nth: int) -> None:
    """A restore that fails raises the errno, and the file can still be read."""
    writer.write(FileImage.of("model", [_DATA]), tmp_path)
    back = FileImage.of("model", [bytearray(len(_DATA))])
    meddle(_Nth(nth, -errno.EIO))
    with pytest.raises(TransferError) as caught:
        writer.read(back, tmp_path)
    assert caught.value.errno == errno.EIO
    writer.read(back, tmp_path)
    assert back.views(0, len(_DATA))[0].tobytes() == _DATA.tobytes()


@pytest.mark.parametrize("operation", ["write", "read"])
@pytest.mark.parametrize("call", ["wait", "write"])
def test_a_ring_that_fails_itself(writer, names, monkeypatch, tmp_path, call, operation) -> None:
    """The transfer ends with its error, no file is published, and the next one works."""
    writer.write(FileImage.of("old", [_DATA]), tmp_path)
    back = FileImage.of("old", [bytearray(len(_DATA))])

    class Breaking(PyuringRing):
        """A ring that fails at its third call of a method, permanently."""

        left = 2

    def breaking(ring: Breaking, *arguments: int) -> object:
        ring.left -= 1
        if ring.left < 0:
            ring._broken = OSError(errno.EBADF, "Bad file descriptor")
            raise ring._broken
        return real(ring, *arguments)

    method = "read" if (call, operation) == ("write", "read") else call
    real = getattr(PyuringRing, method)
    setattr(Breaking, method, breaking)
    memory: list[object] = []
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_lost", memory)
        patch.setattr(file_writer, "PyuringRing", Breaking)
        image = FileImage.of("model", [_DATA]) if operation == "write" else back
        move = writer.write if operation == "write" else writer.read
        with pytest.raises(TransferError) as caught:
            move(image, tmp_path)
    assert caught.value.errno == errno.EBADF
    assert bool(memory) == (call != "write")
    assert names(tmp_path) == {"old"}
    writer.write(FileImage.of("model", [_DATA]), tmp_path)
    writer.read(back, tmp_path)
    assert back.views(0, len(_DATA))[0].tobytes() == _DATA.tobytes()


def test_retries_are_counted(writer, meddle, tmp_path) -> None:
    """A Transfer counts the retries."""
    meddle(_Nth(3, -errno.EAGAIN))
    moved = writer.write(FileImage.of("model", [_DATA]), tmp_path)
    assert moved.retries == 1
    assert moved.paths["io_uring direct"].operations == _BLOCKS + 1


@pytest.mark.parametrize("operation", ["write", "read"])
def test_an_interrupt(writer, names, monkeypatch, tmp_path, operation) -> None:
    """Ctrl-C during a transfer is raised unchanged, after the kernel's last use of the memory."""
    writer.write(FileImage.of("old", [_DATA]), tmp_path)
    back = FileImage.of("old", [bytearray(len(_DATA))])
    begun = threading.Event()

    class Interrupting(PyuringRing):
        """Rings whose first completion comes with a Ctrl-C in the main thread."""

        open_now = 0

        def __init__(self, depth: int) -> None:
            super().__init__(depth)
            Interrupting.open_now += 1

        def wait(self) -> tuple[int, int]:
            if not begun.is_set():
                begun.set()
                _thread.interrupt_main()
            return super().wait()

        def close(self) -> None:
            super().close()
            Interrupting.open_now -= 1

    monkeypatch.setattr(file_writer, "PyuringRing", Interrupting)
    move = {
        "write": lambda: writer.write(FileImage.of("model", [_DATA]), tmp_path),
        "read": lambda: writer.read(back, tmp_path),
    }[operation]
    with pytest.raises(KeyboardInterrupt):
        move()
    assert begun.is_set()
    assert Interrupting.open_now == 0
    assert names(tmp_path) == {"old"}
    writer.read(back, tmp_path)
    assert back.views(0, len(_DATA))[0].tobytes() == _DATA.tobytes()
