"""Any failure at any time: no hang, one completion per range, and each block is returned once or
lost."""

from __future__ import annotations

import ctypes
import errno
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from support.counted_pool import CountedPool
from support.every_bytecode import raised_within

from iobench import linux
from iobench.errors import DataMismatchError
from iobench.testing import content
from iobench.writers.blocks.pages import fresh_pages
from iobench.writers.direct import engine as direct_engine
from iobench.writers.direct.engine import BlockingEngine, DirectEngine, RingEngine
from iobench.writers.direct.file import FileSetting, IoPath, PathFile, PathSupport
from iobench.writers.image import Bytes, Extent, FileImage
from iobench.writers.local import direct_file
from iobench.writers.local.direct_file import DirectFile
from iobench.writers.transfer import Meter

_PAGE = linux.PAGE
_PIECE = 4 * _PAGE
_RANGE = 2 * _PIECE
_RANGES = 4
_DATA = content(_RANGES * _RANGE)
_DEADLOCK_S = 20


@dataclass(frozen=True)
class _Fault:
    """The fault of one completion (`result`), wait or submission (`error`)."""

    where: str
    result: int = 0
    error: type[BaseException] | None = None
    number: int = 0


_COMPLETIONS = {
    "EIO": _Fault("completion", -errno.EIO, number=errno.EIO),
    "ENOSPC": _Fault("completion", -errno.ENOSPC, number=errno.ENOSPC),
    "EINVAL": _Fault("completion", -errno.EINVAL, number=errno.EINVAL),
    "nothing": _Fault("completion", 0, number=errno.EIO),
    "too short to go on": _Fault("completion", 100, number=errno.EIO),
    "short": _Fault("completion", _PAGE),
    "EAGAIN": _Fault("completion", -errno.EAGAIN),
    "ECANCELED": _Fault("completion", -errno.ECANCELED),
}
_OF_THE_RING = {
    "wait": _Fault("wait", error=OSError, number=errno.EBADF),
    "submission": _Fault("submission", error=OSError, number=errno.EEXIST),
    "no memory": _Fault("submission", error=MemoryError),
}


class _Ring:
    """Moves bytes of the file when an operation completes; the `nth` call fails with `fault`."""

    def __init__(self, fault: _Fault, nth: int) -> None:
        self._fault, self._nth = fault, nth
        self._seen: Counter[str] = Counter()
        self._queued: list[tuple[bool, int, int, int, int, int]] = []
        self._refuses = self._dead = self.closed = False

    def lost(self) -> set[int]:
        """Addresses of what the kernel has."""
        return {address for _, _, address, *_ in self._queued}

    def lost_ranges(self) -> set[int]:
        """The numbers of the ranges to which that memory belongs."""
        return {offset // _RANGE for *_, offset, _ in self._queued}

    def write(self, fd: int, address: int, length: int, offset: int, tag: int) -> None:
        self._queue(True, fd, address, length, offset, tag)

    def read(self, fd: int, address: int, length: int, offset: int, tag: int) -> None:
        self._queue(False, fd, address, length, offset, tag)

    def _queue(self, *operation: int) -> None:
        if self._refuses:
            raise OSError(self._fault.number, "the ring has failed")
        if self._due("submission"):
            self._refuses = True
            if self._fault.error is MemoryError:
                self._queued.append(operation)
                raise MemoryError
            raise OSError(self._fault.number, os.strerror(self._fault.number))
        self._queued.append(operation)

    def wait(self) -> tuple[int, int]:
        self._expect("wait")
        assert self._queued, "waits for ever"
        return self._end()

    def close(self) -> None:
        self.closed = True

    def _expect(self, where: str) -> None:
        if self._dead or self._due(where):
            self._dead = self._refuses = True
            raise OSError(self._fault.number, os.strerror(self._fault.number))

    def _due(self, where: str) -> bool:
        self._seen[where] += 1
        return where == self._fault.where and self._seen[where] == self._nth + 1

    def _end(self) -> tuple[int, int]:
        writes, fd, address, length, offset, tag = self._queued.pop(0)
        if self._due("completion"):
            length = self._fault.result
        if length > 0 and length % _PAGE == 0:
            memory = memoryview((ctypes.c_char * length).from_address(address)).cast("B")
            length = (os.pwrite if writes else _pread)(fd, memory, offset)
        return tag, length


def _pread(fd: int, memory: memoryview, offset: int) -> int:
    return os.preadv(fd, [memory], offset)


class _Run:
    """One transfer of `_RANGES` ranges by an engine, alone or below a PathFile."""

    def __init__(self, path: Path, *, writes: bool, staged: bool, hybrid: bool) -> None:
        self.writes, self.hybrid = writes, hybrid
        path.write_bytes(bytes(len(_DATA)) if writes else _DATA.tobytes())
        self.fd = os.open(path, os.O_RDWR)
        if hybrid and not writes:  # which would read from the page cache
            os.fsync(self.fd)
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        room = fresh_pages(len(_DATA) + _PAGE, huge=False)
        self.memory = room[1 : len(_DATA) + 1] if staged else room[: len(_DATA)]
        if writes:
            self.memory[:] = _DATA
        self.completed: dict[int, list[bool]] = {}
        self.meter = Meter()

    def move(self, engine: DirectEngine) -> None:
        """Move all ranges; raise the failure of the transfer."""
        image, paths = FileImage.of("image", [self.memory]), (IoPath.DIRECT, IoPath.BUFFERED)
        plain = DirectFile(fd=self.fd, alignment=linux.DioAlignment(memory=_PAGE, offset=_PAGE))
        how = FileSetting(paths=paths, block_size=_RANGE, small_size=_PAGE)
        support = PathSupport("hybrid")
        file = PathFile(self.fd, "image", how, support, writing=self.writes)
        with file, engine:
            for number, start in enumerate(range(0, len(_DATA), _RANGE)):
                completed = self.completed.setdefault(number, []).append
                part = Extent(image, start, start + _RANGE, start)
                if not self.hybrid and self.writes:
                    engine.write(plain, part, completed)
                elif not self.hybrid:
                    engine.read(plain, part, completed)
                elif self.writes:
                    file.write(part, engine, completed)
                else:
                    file.read(part, engine)
                    completed(True)
            engine.drain()

    def close(self) -> bytes:
        """Return the bytes that have arrived."""
        try:
            return os.pread(self.fd, len(_DATA), 0) if self.writes else self.memory.tobytes()
        finally:
            os.close(self.fd)


@pytest.fixture(autouse=True)
def lost(monkeypatch: pytest.MonkeyPatch) -> list[Bytes]:
    """The memory lost in this test; pauses take no time."""
    memory: list[Bytes] = []
    monkeypatch.setattr(direct_engine, "_lost", memory)
    monkeypatch.setattr(direct_engine.time, "sleep", lambda _: None)
    # Reads into aligned memory are in place here, also on virtual machines; see `_cases`.
    monkeypatch.setattr(direct_file, "host_takes_free_memory", lambda: False)
    return memory


def _require_direct(path: Path) -> None:
    path.touch()
    try:
        os.close(os.open(path, os.O_RDWR | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"no O_DIRECT here ({error.strerror})")


def _cases() -> Iterator[tuple[int, bool]]:
    for nth in range(_RANGES * _RANGE // _PIECE):
        for staged in (False, True):
            yield nth, staged


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("fault", [*_COMPLETIONS, *_OF_THE_RING])
def test_a_ring(tmp_path: Path, lost: list[Bytes], fault: str, hybrid: bool, writes: bool) -> None:
    """The nth completion, wait or submission of a transfer fails, for every n."""
    _require_direct(tmp_path / "file")
    how = {**_COMPLETIONS, **_OF_THE_RING}[fault]
    happened = False
    for nth, staged in _cases():
        lost.clear()
        run = _Run(tmp_path / "file", writes=writes, staged=staged, hybrid=hybrid)
        pool, ring = CountedPool(_PIECE), _Ring(how, nth)
        pool.in_kernel = ring.lost
        engine = RingEngine(ring, 3, pool, run.meter, path="fake")
        error = raised_within(_DEADLOCK_S, lambda run=run, engine=engine: run.move(engine))
        arrived = run.close()
        assert ring.closed
        assert len(engine) == 0
        assert {memory.ctypes.data for memory in lost} == ring.lost()
        assert pool.out == (ring.lost() if staged else set())
        if error is None:
            assert arrived == _DATA.tobytes()
            assert run.completed == {number: [True] for number in range(_RANGES)}
            continue
        happened = True
        if how.error is MemoryError:
            assert isinstance(error, MemoryError)
        else:
            expected = OSError if writes or how.result < 0 or how.error else DataMismatchError
            assert isinstance(error, expected)
            assert getattr(error, "errno", None) in (None, how.number)
        if writes or not hybrid:
            for number, completed in run.completed.items():
                assert len(completed) == (number not in ring.lost_ranges())
    expected = bool(how.number) or how.error is not None
    assert happened == expected


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("fault", _COMPLETIONS)
def test_system_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, hybrid: bool, writes: bool
) -> None:
    """The same for a BlockingEngine whose nth pwrite or preadv fails."""
    _require_direct(tmp_path / "file")
    how, name = _COMPLETIONS[fault], "pwritev" if writes else "preadv"
    real = getattr(os, name)
    happened = False
    for nth, staged in _cases():
        run = _Run(tmp_path / "file", writes=writes, staged=staged, hybrid=hybrid)
        pool, calls = CountedPool(_RANGE), iter(range(1000))

        def limited(fd: int, views: list, offset: int, _: int, nth: int = nth, calls=calls) -> int:
            if next(calls) != nth:
                return real(fd, views, offset)
            if how.result < 0:
                raise OSError(-how.result, os.strerror(-how.result))
            part = [views[0][: how.result]]
            return real(fd, part, offset) if how.result % _PAGE == 0 else how.result

        monkeypatch.setattr(os, name, limited)
        engine = BlockingEngine(pool, run.meter, path="fake")
        error = raised_within(_DEADLOCK_S, lambda run=run, engine=engine: run.move(engine))
        monkeypatch.setattr(os, name, real)
        arrived = run.close()
        assert not pool.out
        if error is None:
            assert np.array_equal(np.frombuffer(arrived, np.uint8), _DATA)
            assert run.completed == {number: [True] for number in range(_RANGES)}
        else:
            happened = True
            assert isinstance(error, OSError if writes or how.result < 0 else DataMismatchError)
            assert getattr(error, "errno", None) in (None, how.number, -how.result)
            assert writes is False or [*map(len, run.completed.values())] == [1] * len(
                run.completed
            )
    assert happened == (fault != "short")
