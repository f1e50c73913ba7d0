"""Streams whose block i fails, for every i, before and after they are closed or aborted."""

import errno
import gc
import os
import threading
from collections.abc import Callable, Iterator
from ctypes import string_at
from pathlib import Path

import numpy as np
import pytest
from support.forked import in_child

from iobench.testing import Footprint, content
from iobench.writers import file_writer
from iobench.writers.direct import engine
from iobench.writers.direct.file import PathFile
from iobench.writers.registry import make
from iobench.writers.stream import BlockStream

pytestmark = pytest.mark.timeout(20)  # a watchdog: a wait that hangs here never ends

_BLOCK = 65536
_BLOCKS = 5
_SOON_S = 10
_DATA = content(_BLOCKS * _BLOCK)
_SETTINGS = {
    "odirect": {"threads": 2},
    "uring": {"iodepth": 3},
    "hybrid": {"iodepth": 3, "paths": "direct", "small_size": "16KiB"},
    "hybrid threads": {"iodepth": 2, "paths": "direct", "small_size": "16KiB", "uring": False},
}


class _Storage:
    """Writes blocks. The one at `index` fails with `number`; for 0 it is written in part, once.
    From `held` on, no write ends before `go_on` is set."""

    def __init__(self) -> None:
        self.index, self.number, self.held = -1, 0, _BLOCKS
        self.go_on, self.short = threading.Event(), False
        self.waits = threading.Event()

    def write(self, fd: int, data: bytes, offset: int) -> int:
        """Return the bytes written, or a negative errno."""
        if offset // _BLOCK >= self.held:
            self.waits.set()
            assert self.go_on.wait(_SOON_S)
        if offset == self.index * _BLOCK:
            if self.number:
                return -self.number
            data, self.index = data[: len(data) // 2], -1
        file = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)  # not O_DIRECT: `data` is not aligned
        try:
            return os.pwrite(file, data, offset)
        finally:
            os.close(file)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Storage]:
    """The storage of all streams."""
    storage = _Storage()

    class Ring:
        """Operations end in their order."""

        def __init__(self, depth: int) -> None:
            self._queued: list[tuple[int, int, int, int, int]] = []

        def write(self, fd: int, address: int, length: int, offset: int, tag: int) -> None:
            self._queued.append((fd, address, length, offset, tag))

        def wait(self) -> tuple[int, int]:
            fd, address, length, offset, tag = self._queued.pop(0)
            return tag, storage.write(fd, string_at(address, length), offset)

        def close(self) -> None:
            pass

    def write(fd: int, views: list[np.ndarray], offset: int, unit: int) -> int:
        (data,), done = views, 0
        while done < len(data):
            count = storage.write(fd, bytes(data[done:]), offset + done)
            if count < 0:
                raise OSError(-count, os.strerror(-count))
            done += count
        return 1

    # The file that is written here has pages in the cache, where that of a real ring has none.
    monkeypatch.setattr(PathFile, "resident_bytes", lambda *_: 0)
    monkeypatch.setattr(file_writer, "PyuringRing", Ring)
    monkeypatch.setattr(engine, "pwrite_all", write)
    yield storage
    storage.go_on.set()


@pytest.fixture(params=_SETTINGS)
def open_stream(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], BlockStream]:
    writer = make(request.param.split()[0], block_size=_BLOCK, **_SETTINGS[request.param])
    answer = writer.available(tmp_path)
    if not answer.ok:
        pytest.skip(answer.reason)
    return lambda: writer.open(tmp_path / "file", len(_DATA))


@pytest.mark.parametrize("end", ["close", "abort"])
@pytest.mark.parametrize("held", [False, True], ids=["before", "after"])
def test_block_i_fails(open_stream, storage, tmp_path, end, held) -> None:
    """No file is published, `close` raises that error, no thread is left, and the writer works
    again."""
    for index in range(_BLOCKS):
        for number in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            storage.__init__()
            storage.index, storage.number = index, number
            storage.held = index if held else _BLOCKS
            with Footprint.unchanged():
                _fail(open_stream(), storage, end, number, held=held)
            assert os.listdir(tmp_path) == []
    storage.__init__()
    with open_stream() as stream:
        stream.write(_DATA)
    assert (tmp_path / "file").read_bytes() == _DATA.tobytes()


def _fail(stream: BlockStream, storage: _Storage, end: str, number: int, *, held: bool) -> None:
    def later() -> None:
        assert storage.waits.wait(_SOON_S)
        assert ending.wait(_SOON_S)
        storage.go_on.set()

    ending, helper = threading.Event(), threading.Thread(target=later)
    raised = None
    try:
        if held:
            helper.start()
            stream.write(_DATA[: (storage.index + 1) * _BLOCK])
            assert storage.waits.wait(_SOON_S)
        else:
            stream.write(_DATA)
        ending.set()
        getattr(stream, end)()
    except OSError as error:
        raised = error
        stream.abort()
    finally:
        ending.set()
        if held:
            helper.join()
    assert raised is not None or end == "abort"
    assert raised is None or raised.errno == number


def test_short_writes(open_stream, storage, tmp_path) -> None:
    """A block that was written by half is continued."""
    for index in range(_BLOCKS):
        storage.__init__()
        storage.index = index
        with Footprint.unchanged(), open_stream() as stream:
            stream.write(_DATA)
        assert (tmp_path / "file").read_bytes() == _DATA.tobytes()
        assert storage.index == -1


@pytest.mark.filterwarnings("ignore:.*dropped without close:RuntimeWarning")
def test_collected_in_its_own_worker(open_stream, storage, tmp_path) -> None:
    """A stream in a cycle: its thread does not wait for itself, and the file stays open for it."""
    storage.held = 0
    written = threading.Event()

    def collecting(fd: int, data: bytes, offset: int) -> int:
        result = write(fd, data, offset)  # held until nothing refers to the stream
        gc.collect()
        os.fstat(fd)  # still open, as this thread uses it
        written.set()
        return result

    write, storage.write = storage.write, collecting
    before = {*threading.enumerate()}  # also the one of pytest-timeout
    gc.disable()
    try:
        with Footprint.unchanged():
            stream = open_stream()
            stream.cycle = stream
            stream.write(_DATA[:_BLOCK])
            assert storage.waits.wait(_SOON_S)
            threads = {*threading.enumerate()} - before
            assert threads
            del stream
            storage.go_on.set()
            assert written.wait(_SOON_S)
            for thread in threads:
                thread.join(_SOON_S)
                assert not thread.is_alive()
    finally:
        gc.enable()
    assert os.listdir(tmp_path) == []


def test_a_forked_child(open_stream, storage, tmp_path) -> None:
    """It waits for no thread of its parent and does not change the file, whatever it calls."""
    storage.held = 0
    stream = open_stream()
    stream.write(_DATA[:_BLOCK])
    assert storage.waits.wait(_SOON_S)

    def close() -> None:
        with pytest.raises(OSError, match="forked"):
            stream.close()

    in_child(stream.abort)
    in_child(close)
    in_child(stream.__del__)
    storage.go_on.set()
    stream.write(_DATA[_BLOCK:])
    stream.close()
    assert (tmp_path / "file").read_bytes() == _DATA.tobytes()
