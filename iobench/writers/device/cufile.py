"""cuFile, NVIDIA's library for GPUDirect Storage, through NVIDIA's package `cuda-bindings`."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from iobench.errors import TransferError, UnavailableError

__all__ = ["CuFile", "compatibility_reason", "cufile_missing", "open_cufile"]

_INSTALL = "pip install 'iobench[gds]'"
_DRIVER = Path("/proc/driver/nvidia/version")
_ERRNO = re.compile(r"(\d+) is not a valid")


def cufile_missing() -> tuple[str, str] | None:
    """Return what is missing for cuFile here and the remedy, or None if nothing is missing.

    It does not start cuFile: without a GPU, `cuFileDriverOpen` did not return (cuFile 1.20).
    """
    if not _DRIVER.exists():
        return (
            "there is no NVIDIA driver here, so no GPU is usable.",
            "Use --writer odirect or uring here.",
        )
    try:
        cufile = importlib.import_module("cuda.bindings.cufile")
    except ImportError as error:
        return f"the package cuda-bindings is not installed ({error}).", f"{_INSTALL}."
    import torch

    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} sees no CUDA device.",
            "Install a CUDA build of torch, and give this container or machine a GPU.",
        )
    try:
        cufile.get_version()
    except RuntimeError as error:  # cuda-bindings loads libcufile here and cannot find it
        first_line = str(error).partition("\n")[0]
        return (
            f"libcufile was not found ({first_line}).",
            "pip install nvidia-cufile, or NVIDIA's package gds-tools.",
        )
    return None


@functools.cache
def open_cufile() -> CuFile:
    """Open cuFile once for this process. Raises UnavailableError."""
    missing = cufile_missing()
    if missing is not None:
        raise UnavailableError("gds", *missing)
    return CuFile(importlib.import_module("cuda.bindings.cufile"))


def compatibility_reason(*, nvfs_version: tuple[int, int], p2pdma: bool, forced: bool) -> str:
    """Return why cuFile's own settings make it go through host memory; empty if they do not."""
    if forced:
        return "cuFile is configured for it (force_compat_mode)"
    if nvfs_version == (0, 0) and not p2pdma:
        return (
            "nvidia-fs is not loaded and PCI P2PDMA is not configured; install nvidia-gds and run "
            "modprobe nvidia-fs, or set use_pci_p2pdma in cufile.json"
        )
    return ""


class CuFile:
    """The opened cuFile driver. Safe to use from many threads."""

    def __init__(self, module: Any) -> None:
        """Open the driver; `module` is `cuda.bindings.cufile`.

        Raises UnavailableError with cuFile's name of the error.
        """
        self._cufile = module
        try:
            module.set_stats_level(3)
            module.driver_open()
            module.stats_start()
            properties = _Properties()
            module.driver_get_properties(ctypes.addressof(properties))
            flags = module.BoolConfigParameter
            self.compatibility_reason = compatibility_reason(
                nvfs_version=(properties.nvfs.major_version, properties.nvfs.minor_version),
                p2pdma=module.get_parameter_bool(flags.USE_PCIP2PDMA),
                forced=module.get_parameter_bool(flags.FORCE_COMPAT_MODE),
            )
        except module.cuFileError as error:
            raise UnavailableError(
                "gds",
                f"cuFile cannot be opened: {error}.",
                "Load nvidia-fs (modprobe nvidia-fs), or set allow_compat_mode in cufile.json.",
            ) from error

    def host_operations(self) -> int:
        """Return how many reads and writes of this process cuFile has made through host memory."""
        stats = self._cufile.StatsLevel3()
        self._cufile.get_stats_l3(stats.ptr)
        gpus = int(stats.num_gpus)
        each = stats.per_gpu_stats
        return int(each.n_posix_reads[:gpus].sum() + each.n_posix_writes[:gpus].sum())

    @contextmanager
    def file(self, fd: int) -> Iterator[int]:
        """Register an open file and yield its handle. Raises TransferError if cuFile refuses it."""
        descriptor = self._cufile.Descr()
        descriptor.type = self._cufile.FileHandleType.OPAQUE_FD
        descriptor.handle.fd = fd
        descriptor.fs_ops = 0
        with self._errors("registering the file"):
            handle = self._cufile.handle_register(descriptor.ptr)
        try:
            yield handle
        finally:
            self._cufile.handle_deregister(handle)

    def register(self, address: int, size_bytes: int) -> None:
        """Register device memory for DMA. Raises TransferError."""
        with self._errors("registering a buffer"):
            self._cufile.buf_register(address, size_bytes, 0)

    def deregister(self, address: int) -> None:
        """Undo `register`."""
        with self._errors("releasing a buffer"):
            self._cufile.buf_deregister(address)

    def write(self, handle: int, address: int, size_bytes: int, offset: int, within: int) -> int:
        """Write memory, from byte `within` after `address`, to the file at `offset`.

        Returns the bytes written, which may be fewer than `size_bytes`. Raises OSError for errors
        of the file system and TransferError for cuFile's.
        """
        return self._moved(self._cufile.write, handle, address, size_bytes, offset, within)

    def read(self, handle: int, address: int, size_bytes: int, offset: int, within: int) -> int:
        """Read from the file at `offset` into memory, from byte `within` after `address`.

        Returns the bytes read, 0 at the end of the file. Raises like `write`.
        """
        return self._moved(self._cufile.read, handle, address, size_bytes, offset, within)

    def _moved(self, call: Callable[..., int], *where: int) -> int:
        doing = f"{call.__name__} of {where[2]} bytes at {where[3]}"
        with self._errors(doing):
            count = call(*where)
        if count >= 0:
            return count
        try:
            name = self._cufile.OpError(-count).name
        except ValueError:
            name = f"error {count}"
        raise TransferError(f"cuFile, {doing}: {name}")

    @contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        """Raise cuFile's errors as TransferError with their names, the kernel's as OSError."""
        try:
            yield
        except self._cufile.cuFileError as error:
            raise TransferError(f"cuFile, {doing}: {error}") from error
        except ValueError as error:  # cuda-bindings raises it for an errno, which has no name there
            number = _ERRNO.match(str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


class _Nvfs(ctypes.Structure):
    _fields_ = (
        ("major_version", ctypes.c_uint),
        ("minor_version", ctypes.c_uint),
        ("poll_thresh_size", ctypes.c_size_t),
        ("max_direct_io_size", ctypes.c_size_t),
        ("dstatusflags", ctypes.c_uint),
        ("dcontrolflags", ctypes.c_uint),
    )


class _Properties(ctypes.Structure):
    """CUfileDrvProps_t of cufile.h, with space for fields of later versions."""

    _fields_ = (("nvfs", _Nvfs), ("rest", ctypes.c_uint * 64))
