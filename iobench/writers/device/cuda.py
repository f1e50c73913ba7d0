"""CUDA memory through torch: copies on a separate stream, and pinned host blocks.

It is imported with the first CUDA tensor; `import iobench` and the writers do not import torch.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
import torch

from iobench import linux
from iobench.errors import TransferError, UsageError
from iobench.writers.device.base import Device, DeviceBytes, Lane, Mark
from iobench.writers.image import AnyMemory, Bytes

__all__ = ["CudaBytes", "CudaDevice", "cuda_device"]

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process
_ALREADY = 712  # cudaErrorHostMemoryAlreadyRegistered


class CudaBytes(DeviceBytes):
    """The bytes of `tensor`, which must be contiguous uint8 with one dimension. Keeps it alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise UsageError(
                f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)}: bytes of a device must "
                "be one contiguous dimension of uint8"
            )
        self.tensor: torch.Tensor = tensor
        self.device = cuda_device(tensor.device)

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()

    def __len__(self) -> int:
        return self.tensor.numel()

    def __getitem__(self, part: slice) -> Self:
        return type(self)(self.tensor[part])


def cuda_device(device: torch.device) -> CudaDevice:
    """Return the CudaDevice of `device`; without an index, that of the current device."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return _cuda_device(index)


@functools.cache
def _cuda_device(index: int) -> CudaDevice:
    return CudaDevice(index)


class CudaDevice(Device):
    """One GPU, identified by its index in this process."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = f"cuda:{index}"

    def lane(self) -> CudaLane:
        return CudaLane(self)

    def pin(self, block: Bytes) -> str | None:
        return _pin(block)

    def allocate(self, size_bytes: int) -> CudaBytes:
        with _cuda_errors(f"allocating on {self.name}"):
            room = torch.empty(size_bytes + linux.PAGE, dtype=torch.uint8, device=self.name)
        begin = -room.data_ptr() % linux.PAGE
        return CudaBytes(room[begin : begin + size_bytes])


class CudaLane(Lane):
    """A CUDA stream that starts after the work queued on the caller's current stream."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        with _cuda_errors(f"opening a stream on {device.name}"):
            self._stream = torch.cuda.Stream(device=device.index)
            self._stream.wait_stream(torch.cuda.current_stream(device.index))

    def copy(self, source: AnyMemory, destination: AnyMemory) -> None:
        non_blocking = True
        if isinstance(source, np.ndarray) and not source.flags.writeable:
            # torch.from_numpy warns of read-only memory. The temporary copy must outlive the copy
            # to the device, so this one blocks.
            source, non_blocking = source.copy(), False
        with _cuda_errors(f"copying on {self._device.name}"), torch.cuda.stream(self._stream):
            _tensor(destination).copy_(_tensor(source), non_blocking=non_blocking)

    def mark(self) -> CudaMark:
        with _cuda_errors(f"copying on {self._device.name}"):
            # A blocking event sleeps in `synchronize`; spinning would take a core from the writers.
            event = torch.cuda.Event(blocking=True)
            event.record(self._stream)
        return CudaMark(event, self._device.name)

    def close(self) -> None:
        with _cuda_errors(f"copying on {self._device.name}"):
            self._stream.synchronize()


class CudaMark(Mark):
    """A CUDA event."""

    def __init__(self, event: torch.cuda.Event, name: str) -> None:
        self._event, self._name = event, name

    def wait(self) -> None:
        with _cuda_errors(f"copying on {self._name}"):
            self._event.synchronize()


def _tensor(memory: AnyMemory) -> torch.Tensor:
    if isinstance(memory, CudaBytes):
        return memory.tensor
    assert isinstance(memory, np.ndarray)
    return torch.from_numpy(memory)


_pinned: dict[int, weakref.finalize[[int], np.ndarray]] = {}
_pinned_lock = threading.RLock()  # the collector may run `_unpin` in a thread that holds it


def _pin(block: Bytes) -> str | None:
    """Pin the whole allocation that contains `block`, until numpy frees it."""
    root = block
    while isinstance(root.base, np.ndarray):
        root = root.base
    address, size = root.ctypes.data, root.nbytes
    if address % linux.PAGE or size % linux.PAGE:
        return None  # not a staging block; pinning would affect other memory on its pages
    with _pinned_lock:
        if address in _pinned:
            return None
        code = int(_cudart().cudaHostRegister(address, size, _PORTABLE))
        if code == _ALREADY:  # by other code, which also has to unpin it
            return None
        if code:
            return f"cudaHostRegister of {size} bytes failed with CUDA error {code}"
        done = weakref.finalize(root, _unpin, address)
        done.atexit = False  # the driver may be shut down already when the process exits
        _pinned[address] = done
    return None


def _unpin(address: int) -> None:
    with _pinned_lock:
        _pinned.pop(address, None)
    _cudart().cudaHostUnregister(address)


def _cudart() -> Any:
    return torch.cuda.cudart()


@contextlib.contextmanager
def _cuda_errors(doing: str) -> Iterator[None]:
    """Raise torch's CUDA errors as a TransferError with one line."""
    try:
        yield
    except RuntimeError as error:  # base of torch.AcceleratorError and torch.OutOfMemoryError
        raise TransferError(f"{doing}: {str(error).partition(chr(10))[0]}") from error
