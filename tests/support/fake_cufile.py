"""FakeCuFile: the functions of cuda.bindings.cufile for the memory of a FakeDevice.

It reads and writes real files with pread and pwrite. It checks cuFile's requirements: a registered
file, registered memory, and aligned offsets, lengths and addresses.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from iobench import linux
from iobench.writers import gds
from iobench.writers.base import Writer
from iobench.writers.device.cufile import CuFile
from support.fake_device import FakeDevice, on_device

__all__ = ["Fails", "FakeCuFile", "play_gds"]


class _FileHandleType(IntEnum):
    OPAQUE_FD = 1


class _BoolConfigParameter(IntEnum):
    PROPERTIES_ALLOW_COMPAT_MODE = 1
    FORCE_COMPAT_MODE = 2
    USE_PCIP2PDMA = 7


class _OpError(IntEnum):
    SUCCESS = 0
    DRIVER_NOT_INITIALIZED = 5001
    IO_NOT_SUPPORTED = 5008
    NVFS_DRIVER_ERROR = 5010
    INVALID_VALUE = 5022
    MEMORY_NOT_REGISTERED = 5024
    HANDLE_NOT_REGISTERED = 5027
    GPU_MEMORY_PINNING_FAILED = 5036


class _CuFileError(Exception):
    def __init__(self, status: int, cu_err: int | None = None) -> None:
        self.status, self.cuda_error = status, cu_err
        known = _OpError(status)  # ValueError for an errno, like the bindings
        super().__init__(f"{known.name} ({status})")


class _Handle(ctypes.Union):
    _fields_ = (("fd", ctypes.c_int), ("handle", ctypes.c_void_p))


class _Descr(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("handle", _Handle), ("fs_ops", ctypes.c_void_p))

    @property
    def ptr(self) -> int:
        return ctypes.addressof(self)


class _StatsLevel3:
    def __init__(self) -> None:
        self.num_gpus = 0
        self.per_gpu_stats = SimpleNamespace(
            n_posix_reads=np.zeros(16, dtype=np.uint64),
            n_posix_writes=np.zeros(16, dtype=np.uint64),
        )

    @property
    def ptr(self) -> int:
        return id(self)


@dataclass(frozen=True)
class Fails:
    """The result of an operation that raises cuFileError; ValueError if the status is an errno."""

    status: int


class FakeCuFile:
    """A double of the module. Its attributes select the faults.

    `nvfs` is the version of nvidia-fs, (0, 0) if it is not loaded. With `posix`, the statistics
    report every operation as one through the host. `most` limits the bytes of one operation.
    `refuse` maps a function's name to the status that it fails with. `answer` maps `read` and
    `write` to the results of their next calls, which move nothing: a number to return, or `Fails`.
    """

    Descr, StatsLevel3 = _Descr, _StatsLevel3
    FileHandleType, BoolConfigParameter, OpError = _FileHandleType, _BoolConfigParameter, _OpError
    cuFileError = _CuFileError  # noqa: N815 -- cuFile's name

    def __init__(
        self,
        *,
        nvfs: tuple[int, int] = (2, 22),
        p2pdma: bool = False,
        forced: bool = False,
        posix: bool = False,
        most: int = 0,
    ) -> None:
        self.nvfs, self.p2pdma, self.forced, self.posix, self.most = (
            *(nvfs, p2pdma, forced),
            *(posix, most),
        )
        self.refuse: dict[str, int] = {}
        self.answer: dict[str, list[int | Fails]] = {}
        self.opened = 0
        self.files: dict[int, int] = {}
        self.buffers: dict[int, int] = {}
        self.operations = 0
        self._stats: dict[int, _StatsLevel3] = {}
        self._next = 1000
        self._lock = threading.Lock()

    def get_version(self) -> int:
        return 1200

    def driver_open(self) -> None:
        self._refuse_if_asked("driver_open")
        self.opened += 1

    def driver_get_properties(self, props: int) -> None:
        self._needs_driver()
        versions = (ctypes.c_uint * 2).from_address(props)
        versions[0], versions[1] = self.nvfs

    def get_parameter_bool(self, param: int) -> bool:
        return {2: self.forced, 7: self.p2pdma}.get(int(param), True)

    def set_stats_level(self, level: int) -> None:
        assert level == 3

    def stats_start(self) -> None:
        self._needs_driver()

    def get_stats_l3(self, stats: int) -> None:
        self._needs_driver()
        found: Any = ctypes.cast(stats, ctypes.py_object).value
        found.num_gpus = 1
        found.per_gpu_stats.n_posix_writes[0] = self.operations if self.posix else 0

    def handle_register(self, descr: int) -> int:
        self._needs_driver()
        self._refuse_if_asked("handle_register")
        given = _Descr.from_address(descr)
        assert given.type == _FileHandleType.OPAQUE_FD
        os.fstat(given.handle.fd)
        with self._lock:
            assert given.handle.fd not in self.files.values(), "registered twice"
            self._next += 1
            self.files[self._next] = given.handle.fd
            return self._next

    def handle_deregister(self, fh: int) -> None:
        os.fstat(self.files.pop(fh))  # raises if it is closed already

    def buf_register(self, buf_ptr_base: int, length: int, flags: int) -> None:
        assert flags == 0
        self._refuse_if_asked("buf_register")
        assert buf_ptr_base % linux.PAGE == 0
        assert buf_ptr_base not in self.buffers, "registered twice"
        self.buffers[buf_ptr_base] = length

    def buf_deregister(self, buf_ptr_base: int) -> None:
        del self.buffers[buf_ptr_base]

    def write(
        self, fh: int, buf_ptr_base: int, size: int, file_offset: int, buf_ptr_offset: int
    ) -> int:
        memory = self._memory("write", fh, buf_ptr_base, size, file_offset, buf_ptr_offset)
        if isinstance(memory, int):
            return memory
        return self._system_call(os.pwrite, self.files[fh], memory, file_offset)

    def read(
        self, fh: int, buf_ptr_base: int, size: int, file_offset: int, buf_ptr_offset: int
    ) -> int:
        memory = self._memory("read", fh, buf_ptr_base, size, file_offset, buf_ptr_offset)
        if isinstance(memory, int):
            return memory
        return self._system_call(os.preadv, self.files[fh], [memory], file_offset)

    def _system_call(self, call: Callable[..., int], *arguments: Any) -> int:
        """Return the bytes moved. Raises the kernel's errors as ValueError, like the bindings."""
        try:
            return call(*arguments)
        except OSError as error:
            raise ValueError(f"{error.errno} is not a valid OpError") from error

    def _memory(self, name: str, fh: int, base: int, size: int, offset: int, within: int) -> Any:
        """Return the memory of an operation, or the result of one that moves nothing."""
        with self._lock:
            self.operations += 1
            results = self.answer.get(name)
            result = results.pop(0) if results else None
        if isinstance(result, Fails):
            raise _CuFileError(result.status)
        if result is not None:
            return result
        if fh not in self.files:
            raise _CuFileError(_OpError.HANDLE_NOT_REGISTERED)
        assert not (size | offset | (base + within)) % linux.PAGE, "unaligned"
        if self.buffers:
            assert within + size <= self.buffers[base], "outside of its buffer"
        size = min(size, self.most or size)
        return (ctypes.c_ubyte * size).from_address(base + within)

    def _needs_driver(self) -> None:
        if not self.opened:
            raise _CuFileError(_OpError.DRIVER_NOT_INITIALIZED)

    def _refuse_if_asked(self, name: str) -> None:
        if name in self.refuse:
            raise _CuFileError(self.refuse[name])


def play_gds() -> type[Writer]:
    """Replace cuFile in this process by a FakeCuFile; return `gds` with images on a FakeDevice.

    The replacement is permanent, so call it only in a test's own child process.
    """
    cufile = CuFile(cast(Any, FakeCuFile()))
    for name, fake in {"cufile_missing": lambda: None, "open_cufile": lambda: cufile}.items():
        setattr(gds, name, fake)
    return on_device(gds.GdsWriter, FakeDevice())
