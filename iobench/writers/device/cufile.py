"""cuFile, NVIDIA's library for GPUDirect Storage: the calls of its C API that `gds` makes.

Not torch.cuda.gds: its older versions take a short write for a complete one, its errors have no
errno, and an operation is as long as its storage. Not the package cuda-bindings: its versions must
match those of the library.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from ctypes import c_int, c_long, c_size_t, c_ssize_t, c_void_p
from typing import Any

from iobench.environment.gpu import compatibility_mode, find_cufile, has_driver
from iobench.errors import TransferError, UnavailableError

__all__ = ["CuFile", "cufile_missing", "load", "open_cufile"]

_ERRORS = 5000
"""Smaller numbers are an errno."""
_NAMES = {
    5001: "DRIVER_NOT_INITIALIZED",
    5004: "DRIVER_VERSION_MISMATCH",
    5007: "PLATFORM_NOT_SUPPORTED",
    5008: "IO_NOT_SUPPORTED",
    5009: "DEVICE_NOT_SUPPORTED",
    5010: "NVFS_DRIVER_ERROR",
    5011: "CUDA_DRIVER_ERROR",
    5012: "CUDA_POINTER_INVALID",
    5013: "CUDA_MEMORY_TYPE_INVALID",
    5015: "CUDA_CONTEXT_MISMATCH",
    5016: "INVALID_MAPPING_SIZE",
    5017: "INVALID_MAPPING_RANGE",
    5018: "INVALID_FILE_TYPE",
    5019: "INVALID_FILE_OPEN_FLAG",
    5020: "DIO_NOT_SET",
    5022: "INVALID_VALUE",
    5024: "MEMORY_NOT_REGISTERED",
    5025: "PERMISSION_DENIED",
    5027: "HANDLE_NOT_REGISTERED",
    5030: "INTERNAL_ERROR",
    5033: "NVFS_SETUP_ERROR",
    5036: "GPU_MEMORY_PINNING_FAILED",
}
"""Of CUfileOpError in cufile.h, without the prefix CU_FILE_."""


def cufile_missing() -> tuple[str, str] | None:
    """Return what is missing for cuFile here and the remedy, or None if nothing is missing.

    It does not start cuFile: without a GPU, `cuFileDriverOpen` did not return (cuFile 1.20).
    """
    if not has_driver():
        return (
            "there is no NVIDIA driver here, so no GPU is usable.",
            "Use --writer odirect or uring here.",
        )
    import torch

    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} sees no CUDA device.",
            "Install a CUDA build of torch, and give this container or machine a GPU.",
        )
    if find_cufile() is None:
        return (
            "libcufile was not found.",
            "pip install nvidia-cufile, or NVIDIA's package gds-tools.",
        )
    return None


def open_cufile() -> CuFile:
    """Open cuFile once for this process. Raises UnavailableError."""
    missing = cufile_missing()
    if missing is not None:
        raise UnavailableError("gds", *missing)
    return _opened()


@functools.cache
def _opened() -> CuFile:
    try:
        return CuFile(_loaded())
    except (OSError, AttributeError) as error:  # not a library, or one without a function
        raise UnavailableError(
            "gds", f"libcufile cannot be used ({error}).", "Install another version of it."
        ) from error


def _loaded() -> ctypes.CDLL:
    try:
        return load("libcufile.so.0")  # the one that torch has loaded, or the system's
    except OSError:
        path = find_cufile()
        if path is None:
            raise
        return load(path)


class _Error(ctypes.Structure):
    """CUfileError_t."""

    _fields_ = (("err", c_int), ("cu_err", c_int))


class _Handle(ctypes.Union):
    _fields_ = (("fd", c_int), ("handle", c_void_p))


class _Descriptor(ctypes.Structure):
    """CUfileDescr_t. Its `type` 1 is a descriptor of Linux."""

    _fields_ = (("type", c_int), ("handle", _Handle), ("fs_ops", c_void_p))


_MOVE = (c_void_p, c_void_p, c_size_t, c_long, c_long)
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "cuFileDriverOpen": (_Error, ()),
    "cuFileHandleRegister": (_Error, (c_void_p, c_void_p)),
    "cuFileHandleDeregister": (None, (c_void_p,)),
    "cuFileBufRegister": (_Error, (c_void_p, c_size_t, c_int)),
    "cuFileBufDeregister": (_Error, (c_void_p,)),
    "cuFileWrite": (c_ssize_t, _MOVE),
    "cuFileRead": (c_ssize_t, _MOVE),
}


def load(path: str) -> ctypes.CDLL:
    """Load libcufile. Raises OSError, or AttributeError for a library without these functions."""
    library = ctypes.CDLL(path, use_errno=True)
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class CuFile:
    """The opened cuFile driver. Safe to use from many threads.

    The device of the memory must be the current one of the calling thread.
    """

    def __init__(self, library: Any) -> None:
        """Open the driver; `library` is that of `load`. Raises UnavailableError."""
        self._library = library
        self._pid = os.getpid()
        self.compatibility_reason = compatibility_mode()
        """Why cuFile goes through host memory by its settings; empty if it does not."""
        try:
            self._check("opening the driver", library.cuFileDriverOpen())
        except TransferError as error:
            raise UnavailableError(
                "gds",
                f"{error}.",
                "Load nvidia-fs (modprobe nvidia-fs), or set allow_compat_mode in cufile.json.",
            ) from error

    @property
    def is_own(self) -> bool:
        """Whether this process opened it, and not the parent that forked this one."""
        return os.getpid() == self._pid

    @contextlib.contextmanager
    def file(self, fd: int) -> Iterator[int]:
        """Register an open file and yield its handle. Raises TransferError if cuFile refuses it."""
        if not self.is_own:
            raise UnavailableError(
                "gds",
                "cuFile was opened before this process was forked, and works in its parent only.",
                "Start processes by spawn or forkserver.",
            )
        descriptor, handle = _Descriptor(type=1, handle=_Handle(fd=fd)), c_void_p()
        answer = self._library.cuFileHandleRegister(ctypes.byref(handle), ctypes.byref(descriptor))
        self._check("registering the file", answer)
        assert handle.value is not None
        try:
            yield handle.value
        finally:
            self._library.cuFileHandleDeregister(handle.value)

    def register(self, address: int, size_bytes: int) -> None:
        """Register device memory for DMA. Raises TransferError."""
        answer = self._library.cuFileBufRegister(address, size_bytes, 0)
        self._check("registering a buffer", answer)

    def deregister(self, address: int) -> None:
        """Undo `register`."""
        self._library.cuFileBufDeregister(address)

    def write(self, handle: int, address: int, size_bytes: int, offset: int, within: int) -> int:
        """Write memory, from byte `within` after `address`, to the file at `offset`.

        Returns the bytes written, which may be fewer than `size_bytes`. Raises OSError for errors
        of the file system and TransferError for cuFile's.
        """
        count = self._library.cuFileWrite(handle, address, size_bytes, offset, within)
        return self._moved("a write", count, size_bytes, offset)

    def read(self, handle: int, address: int, size_bytes: int, offset: int, within: int) -> int:
        """Read from the file at `offset` into memory, from byte `within` after `address`.

        Returns the bytes read, 0 at the end of the file. Raises like `write`.
        """
        count = self._library.cuFileRead(handle, address, size_bytes, offset, within)
        return self._moved("a read", count, size_bytes, offset)

    def _moved(self, doing: str, count: int, size_bytes: int, offset: int) -> int:
        if count >= 0:
            return count
        number = ctypes.get_errno() if count == -1 else -count
        if number < _ERRORS:
            raise OSError(number, os.strerror(number))
        raise TransferError(f"cuFile, {doing} of {size_bytes} bytes at {offset}: {_named(number)}")

    def _check(self, doing: str, answer: Any) -> None:
        if answer.err:
            cuda = f", CUDA error {answer.cu_err}" if answer.cu_err else ""
            raise TransferError(f"cuFile, {doing}: {_named(answer.err)}{cuda}")


def _named(number: int) -> str:
    return f"{_NAMES.get(number, 'CUfileOpError')} ({number})"
