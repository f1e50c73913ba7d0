"""The `gds` writer: moves bytes between CUDA memory and storage by cuFile (GPUDirect Storage)."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import weakref
from collections.abc import Iterator, Sequence
from ctypes import c_int, c_long, c_size_t, c_ssize_t, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from iobench import linux
from iobench.environment.gpu import compatibility_mode, find_cufile, has_driver
from iobench.errors import TransferError, UnavailableError, transfer_errors
from iobench.units import MIB
from iobench.writers.base import Availability
from iobench.writers.blocks.workers import BlockPool, Blocks, run_workers
from iobench.writers.device.staging import StagedImage
from iobench.writers.direct.engine import BlockingEngine, DirectOperation
from iobench.writers.image import AnyMemory, DeviceBytes, Extent, FileImage, Ranges
from iobench.writers.local.direct_file import (
    DirectFile,
    read_on,
    reopened,
    written_on,
)
from iobench.writers.local.new_file import NewFile
from iobench.writers.local.posix import OpenRead, PosixWriter
from iobench.writers.odirect import ODirectOptions, ODirectWriter
from iobench.writers.options import DirectValues, block_size_option, option
from iobench.writers.stream import BlockStream
from iobench.writers.transfer import Meter

if TYPE_CHECKING:
    from iobench.writers.device.cuda import Device

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


@functools.cache
def open_cufile() -> CuFile:
    """Open cuFile once for this process. Raises UnavailableError."""
    missing = cufile_missing()
    if missing is not None:
        raise UnavailableError("gds", *missing)
    try:
        try:
            library = load_cufile(
                "libcufile.so.0"
            )  # the one that torch has loaded, or the system's
        except OSError:
            library = load_cufile(find_cufile() or "libcufile.so")
        return CuFile(library)
    except (OSError, AttributeError) as error:  # not a library, or one without a function
        raise UnavailableError(
            "gds", f"libcufile cannot be used ({error}).", "Install another version of it."
        ) from error


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


def load_cufile(path: str) -> ctypes.CDLL:
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

    def move(
        self, handle: int, address: int, size_bytes: int, offset: int, within: int, *, writes: bool
    ) -> int:
        """Write memory, from byte `within` after `address`, to the file at `offset`; or read it.

        Returns the bytes moved, which may be fewer than `size_bytes`: 0 at the end of the file.
        Raises OSError for errors of the file system and TransferError for cuFile's.
        """
        call = self._library.cuFileWrite if writes else self._library.cuFileRead
        count: int = call(handle, address, size_bytes, offset, within)
        if count >= 0:
            return count
        number = ctypes.get_errno() if count == -1 else -count
        if number < _ERRORS:
            raise OSError(number, os.strerror(number))
        doing = f"a {'write' if writes else 'read'} of {size_bytes} bytes at {offset}"
        raise TransferError(f"cuFile, {doing}: {_named(number)}")

    def _check(self, doing: str, answer: Any) -> None:
        if answer.err:
            cuda = f", CUDA error {answer.cu_err}" if answer.cu_err else ""
            raise TransferError(f"cuFile, {doing}: {_named(answer.err)}{cuda}")


def _named(number: int) -> str:
    return f"{_NAMES.get(number, 'CUfileOpError')} ({number})"


_COMPAT = "cuFile compatibility mode"


@dataclass(frozen=True, kw_only=True)
class GdsOptions(ODirectOptions):
    """Options of `gds`."""

    block_size: int = block_size_option(
        16 * MIB,
        search=(MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB),
        help="bytes of one cuFile write or read",
    )
    threads: int = option(
        4, low=1, high=256, search=(1, 2, 4, 8, 16), help="workers, each with one block in flight"
    )


class GdsWriter(ODirectWriter):
    """Workers gather blocks in GPU memory, and cuFile writes them from there.

    A block is GPU memory that is registered with cuFile and kept for the next transfer. Every
    operation is therefore aligned, whatever the sizes of the tensors. The copy within the GPU takes
    a few hundredths of the time over PCIe. The tail is padded, written and truncated. Blocks
    without device memory, and streams, use the path of `odirect`. If cuFile goes through host
    memory (compatibility mode), the Transfer has a fallback with the reason.
    """

    name = "gds"
    summary = "GPU memory straight to storage by cuFile (GPUDirect Storage), 16 MiB blocks"
    Options = GdsOptions
    options: GdsOptions

    # `_send_ranges` and `_receive_files` decide for each image who takes it.
    _write_batch = PosixWriter._write_batch
    read_many = PosixWriter.read_many

    def __init__(self, options: GdsOptions | None = None, **values: Unpack[DirectValues]) -> None:
        super().__init__(options, **values)
        self._blocks: dict[Device, _Blocks] = {}

    def available(self, target: str | Path = ".") -> Availability:
        missing = cufile_missing()
        if missing is not None:
            return Availability(ok=False, reason=missing[0], remedy=missing[1])
        return super().available(target)

    def _probe_memory(self, size_bytes: int) -> AnyMemory:
        import torch

        from iobench.writers.device.cuda import cuda_device

        return cuda_device(torch.device("cuda")).allocate(size_bytes)

    def _send_ranges(
        self, fd: int, path: str, image: FileImage, ranges: Ranges, meter: Meter
    ) -> None:
        if not self._by_cufile(fd, image, ranges, meter, writes=True):
            super()._send_ranges(fd, path, image, ranges, meter)

    def _receive_files(self, reads: Sequence[OpenRead], meter: Meter) -> None:
        for one in reads:
            with transfer_errors("reading", one.path):
                if not self._by_cufile(one.fd, one.image, one.ranges, meter, writes=False):
                    super()._receive_files([one], meter)

    def _by_cufile(
        self, fd: int, image: FileImage, ranges: Ranges, meter: Meter, *, writes: bool
    ) -> bool:
        """Move ranges in blocks. If cuFile cannot, record a fallback and return False."""
        if not isinstance(image, StagedImage):
            if image.size_bytes:
                meter.fell_back("gds", "direct", "the image is in host memory, not in a GPU's")
            return False
        cufile = open_cufile()
        # Opened once more, as cuFile refuses descriptors with O_TMPFILE, O_NOFOLLOW or O_EXCL.
        mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
        found = reopened(fd, mode, self.name, image.path, self.options.block_size)
        unit = max(found.alignment.offset, linux.PAGE)
        direct = DirectFile(found.fd, linux.DioAlignment(memory=linux.PAGE, offset=unit))
        with contextlib.ExitStack() as registered:
            registered.callback(os.close, direct.fd)
            try:
                handle = registered.enter_context(cufile.file(direct.fd))
            except TransferError as error:
                meter.fell_back("gds", "direct", str(error))
                return False
            if cufile.compatibility_reason:
                meter.fell_back("gds", _COMPAT, cufile.compatibility_reason)

            def work(blocks: Blocks, own: Meter) -> None:
                for begin, end in blocks:
                    part = Extent(image, begin, end, begin - begin % unit)
                    device = _first_device(image, begin, end)
                    if device is None:
                        engine = BlockingEngine(self._pool, own, path="direct")
                    else:
                        pool = self._blocks.get(device)
                        if pool is None:
                            made = _Blocks(self.options.block_size, cufile, device)
                            pool = self._blocks.setdefault(device, made)
                        engine = _CuFileEngine(handle, pool, own)
                    if writes:
                        engine.write(direct, part)
                    else:
                        engine.read(direct, part, part.filled)

            blocks = Blocks(ranges, self.options.block_size, unit)
            run_workers(self.options.threads, blocks, work, meter)
        return True

    def _stream(self, file: NewFile, meter: Meter, size: int | None) -> BlockStream:
        meter.fell_back("gds", "direct", "a stream's bytes come from host memory")
        return super()._stream(file, meter, size)


def _first_device(image: FileImage, start: int, stop: int) -> Device | None:
    """Return the device of the first device bytes in the range, or None."""
    pieces = image.pieces(start, stop)
    return next((piece.device for piece in pieces if isinstance(piece, DeviceBytes)), None)


class _CuFileEngine(BlockingEngine):
    """Moves blocks of GPU memory by cuFile; `handle` is that of the file."""

    def __init__(self, handle: int, pool: _Blocks, meter: Meter) -> None:
        super().__init__(pool, meter, path="gds")
        self._handle, self._blocks = handle, pool

    def _move(self, operation: DirectOperation) -> int:
        done = calls = 0
        blocks, block, unit = self._blocks, operation.data, operation.file.alignment.offset
        assert isinstance(block, DeviceBytes)
        base, offset = block.address, operation.offset
        moved_on = written_on if operation.writes else read_on
        if base not in blocks.registered:
            self.meter.fell_back("registered GPU memory", "cuFile's own buffers", blocks.refusal)
        with blocks.device.current():
            while done < operation.wanted:
                # An offset is for registered memory only, whose address must be the registered one.
                address, within = (base, done) if base in blocks.registered else (base + done, 0)
                count = blocks.cufile.move(
                    *(self._handle, address, len(block) - done, offset + done, within),
                    writes=operation.writes,
                )
                calls += 1
                done = moved_on(done, count, operation.wanted, offset, unit)
        return calls


class _Blocks(BlockPool):
    """Blocks of GPU memory that are registered with cuFile as long as their writer exists."""

    def __init__(self, size_bytes: int, cufile: CuFile, device: Device) -> None:
        super().__init__(size_bytes)
        self.cufile, self.device = cufile, device
        self.registered: set[int] = set()
        """Their addresses."""
        self.refusal = ""
        """Why cuFile cannot register one."""

    def _make(self) -> list[Any]:
        memory = self.device.allocate(self.block_size)
        address = memory.address
        try:
            with self.device.current():
                self.cufile.register(address, self.block_size)
        except TransferError as error:
            self.refusal = str(error)
        else:
            self.registered.add(address)
            release = weakref.finalize(self, _release, self.cufile, self.device, address)
            release.atexit = False
        return [memory]


def _release(cufile: CuFile, device: Device, address: int) -> None:
    if cufile.is_own:
        with device.current():
            cufile.deregister(address)
