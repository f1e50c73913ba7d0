"""FakeCuFile: the functions of libcufile for the memory of a FakeDevice.

It reads and writes real files with pread and pwrite. It checks cuFile's requirements: a registered
file without refused flags, registered memory, aligned offsets, lengths and addresses, and the
device of the memory as the current one of the thread.
"""

import ctypes
import fcntl
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from iobench import linux
from iobench.environment import gpu
from iobench.writers import gds
from iobench.writers.base import Writer
from iobench.writers.gds import CuFile
from support.fake_device import FakeDevice, on_device

_REFUSED = os.O_NOFOLLOW | (os.O_TMPFILE & ~os.O_DIRECTORY)
_HANDLE_NOT_REGISTERED = 5027
_CUDA_CONTEXT_MISMATCH = 5015
_INVALID_FILE_OPEN_FLAG = 5019


class FakeCuFile:
    """A double of the library, for memory of `device`. Its attributes select the faults.

    `most` limits the bytes of one operation. `refuse` maps a function's name to the error that it
    returns. `answer` maps `cuFileRead` and `cuFileWrite` to the results of their next calls, which
    move nothing; a result of -1 has the errno `errno`.
    """

    def __init__(self, device: FakeDevice, *, most: int = 0) -> None:
        self.device, self.most = device, most
        self.refuse: dict[str, int] = {}
        self.answer: dict[str, list[int]] = {}
        self.errno = 0
        self.opened = 0
        self.files: dict[int, int] = {}
        self.buffers: dict[int, int] = {}
        self.operations = 0
        self._next = 1000
        self._lock = threading.Lock()

    def use(self, monkeypatch: pytest.MonkeyPatch, *, by_children: bool = False) -> None:
        """Stand in for the library on a machine with a GPU, until the test ends.

        Forked children may use it if `by_children` is true; a real cuFile never allows that.
        """
        cufile: list[CuFile] = []

        def opened() -> CuFile:
            if not cufile or (by_children and not cufile[0].is_own):
                cufile[:] = [CuFile(self)]
            return cufile[0]

        def allocate(size_bytes: int) -> object:
            return self.device.upload(np.zeros(size_bytes, dtype=np.uint8))

        monkeypatch.setattr(gds, "cufile_missing", lambda: None)
        monkeypatch.setattr(gds, "open_cufile", opened)
        monkeypatch.setattr(gds.GdsWriter, "_probe_memory", lambda _, size: allocate(size))
        if not gpu._NVIDIA_FS.exists():
            monkeypatch.setenv("CUFILE_USE_PCIP2PDMA", "1")

    def cuFileDriverOpen(self) -> Any:  # noqa: N802 -- cuFile's name
        self.opened += 1
        return self._answer("cuFileDriverOpen")

    def cuFileHandleRegister(self, handle: Any, descriptor: Any) -> Any:  # noqa: N802 -- cuFile's name
        given = descriptor._obj
        assert given.type == 1
        fd = given.handle.fd
        if fcntl.fcntl(fd, fcntl.F_GETFL) & _REFUSED:
            return self._error(_INVALID_FILE_OPEN_FLAG)
        answer = self._answer("cuFileHandleRegister")
        if not answer.err:
            with self._lock:
                assert fd not in self.files.values(), "registered twice"
                self._next += 1
                self.files[self._next] = fd
                handle._obj.value = self._next
        return answer

    def cuFileHandleDeregister(self, handle: int) -> None:  # noqa: N802 -- cuFile's name
        os.fstat(self.files.pop(handle))  # raises if it is closed already

    def cuFileBufRegister(self, address: int, length: int, flags: int) -> Any:  # noqa: N802 -- cuFile's name
        assert flags == 0
        answer = self._answer("cuFileBufRegister")
        if not answer.err:
            assert address % linux.PAGE == 0
            assert address not in self.buffers, "registered twice"
            assert self.device.is_current
            self.buffers[address] = length
        return answer

    def cuFileBufDeregister(self, address: int) -> Any:  # noqa: N802 -- cuFile's name
        assert self.device.is_current
        del self.buffers[address]
        return self._error(0)

    def cuFileWrite(self, *where: int) -> int:  # noqa: N802 -- cuFile's name
        return self._move("cuFileWrite", os.pwrite, *where)

    def cuFileRead(self, *where: int) -> int:  # noqa: N802 -- cuFile's name
        def read(fd: int, memory: Any, offset: int) -> int:
            return os.preadv(fd, [memory], offset)

        return self._move("cuFileRead", read, *where)

    def _move(
        self,
        name: str,
        call: Callable[[int, Any, int], int],
        handle: int,
        base: int,
        size: int,
        offset: int,
        within: int,
    ) -> int:
        with self._lock:
            self.operations += 1
            results = self.answer.get(name)
            result = results.pop(0) if results else None
        if result is not None:
            ctypes.set_errno(self.errno)
            return result
        if handle not in self.files:
            return -_HANDLE_NOT_REGISTERED
        if not self.device.is_current:
            return -_CUDA_CONTEXT_MISMATCH
        assert not (size | offset | (base + within)) % linux.PAGE, "unaligned"
        if base in self.buffers:
            assert within + size <= self.buffers[base], "outside of its buffer"
        else:
            assert not within, "an offset is for registered memory"
        size = min(size, self.most or size)
        try:
            memory = (ctypes.c_ubyte * size).from_address(base + within)
            return call(self.files[handle], memory, offset)
        except OSError as error:
            ctypes.set_errno(error.errno or 0)
            return -1

    def _answer(self, name: str) -> Any:
        return self._error(self.refuse.get(name, 0))

    @staticmethod
    def _error(number: int) -> Any:
        return SimpleNamespace(err=number, cu_err=0)


def play_gds() -> type[Writer]:
    """Replace cuFile in this process by a FakeCuFile; return `gds` with images on a FakeDevice.

    The replacement is permanent, so call it only in a test's own child process. Saves that are
    killed are in forked children.
    """
    device = FakeDevice()
    FakeCuFile(device).use(pytest.MonkeyPatch(), by_children=True)
    return on_device(gds.GdsWriter, device)
