"""Tensors as memory of an image. CUDA: copies on a separate stream, and pinned host memory.

It is imported with the first tensor; `import iobench` and the writers do not import torch. Every
call is made with its device as the current one of the thread.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from iobench.errors import TransferError, UsageError
from iobench.linux import PAGE
from iobench.units import KIB
from iobench.writers.blocks.pages import AnyMemory, Bytes, DeviceBytes


def tensor_bytes(tensor: torch.Tensor) -> Bytes:
    """Return the tensor's bytes as a view; as a copy only when it is not contiguous.

    The view keeps the memory alive. Raises UsageError for a tensor that is not dense CPU memory.
    """
    flat: Any = _flat(tensor, here=tensor.is_cpu).numpy()
    view: Bytes = flat
    return view


def tensor_memory(tensor: torch.Tensor) -> AnyMemory:
    """Return the tensor's bytes for an image: `tensor_bytes`, or its memory on a CUDA device."""
    if tensor.device.type != "cuda":
        return tensor_bytes(tensor)
    return device_bytes(_flat(tensor, here=True))


def in_place_memory(tensor: torch.Tensor) -> AnyMemory:
    """Return the memory of `tensor` itself, which a read can fill.

    Raises UsageError for a tensor whose `tensor_memory` is a copy, or that has none.
    """
    if tensor.layout == torch.strided and (
        not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg()
    ):
        raise UsageError(
            f"a tensor of shape {tuple(tensor.shape)} is not contiguous, or a view that conjugates "
            "or negates; make a contiguous copy first"
        )
    return tensor_memory(tensor)


def device_bytes(flat: torch.Tensor) -> DeviceBytes:
    """Return a one-dimensional uint8 tensor on a CUDA device as memory of an image."""
    if flat.dtype != torch.uint8 or flat.dim() != 1 or not flat.is_contiguous():
        raise UsageError(
            f"a {flat.dtype} tensor of shape {tuple(flat.shape)}: bytes of a device must be one "
            "contiguous dimension of uint8"
        )
    return DeviceBytes(flat, cuda_device(flat.device))


def _flat(tensor: torch.Tensor, *, here: bool) -> torch.Tensor:
    """Return the tensor's bytes on its device, as one-dimensional uint8.

    Raises UsageError unless `here`, which says that the device is supported, and for a sparse
    tensor.
    """
    if not here or tensor.layout != torch.strided:
        raise UsageError(
            f"a tensor of layout {tensor.layout} on {tensor.device} has no plain bytes; "
            "call .cpu() or .to_dense() first"
        )
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    dense = resolved(tensor).contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` detached, with lazy conjugation and negation applied to its memory."""
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        return plain.resolve_conj().resolve_neg()
    return plain


_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process
_ALREADY = 712  # cudaErrorHostMemoryAlreadyRegistered
_GPU_PAGE = 64 * KIB  # of the mappings that GPUDirect reads and writes


def cuda_device(device: torch.device) -> Device:
    """Return the Device of `device`; without an index, that of the current device."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return _cuda_device(index)


@functools.cache
def _cuda_device(index: int) -> Device:
    return Device(index)


class Device:
    """One GPU, identified by its index in this process. It exists as long as the process."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = f"cuda:{index}"

    def current(self) -> AbstractContextManager[object]:
        """Make it the current device of the calling thread, and the previous one again after it.

        A library that takes addresses on the device needs that. A new thread has device 0, where
        the first call takes memory for a context.
        """
        # At its end it does not initialize the previous device, as torch.cuda.stream alone does.
        return torch.cuda.device(self.index)

    @contextlib.contextmanager
    def using(self, doing: str) -> Iterator[None]:
        """Make it the current device, and raise torch's errors as a TransferError of one line."""
        try:
            with self.current():
                yield
        except RuntimeError as error:  # base of torch.AcceleratorError and torch.OutOfMemoryError
            first_line = str(error).partition("\n")[0]
            raise TransferError(f"{doing} on {self.name}: {first_line}") from error

    def stream(self) -> CopyStream:
        """Return a new stream, ordered after everything the calling thread has queued.

        It must therefore be created in the thread that calls the writer, before workers copy.
        """
        return CopyStream(self)

    def pin(self, memory: Bytes) -> str | None:
        """Pin the whole allocation that contains `memory` for DMA, until numpy frees it.

        Pinning twice is free. Returns None, or the reason why it is not pinned. Copies still work
        then, but more slowly.
        """
        root = memory
        while isinstance(root.base, np.ndarray):
            root = root.base
        address, size = root.ctypes.data, root.nbytes
        if address % PAGE or size % PAGE:
            return None  # not memory of ours; pinning would affect other memory on its pages
        with _pinned_lock, self.using("pinning memory"):
            if address in _pinned:
                return None
            code = int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE))
            if code:
                self._clear_error()
            if code == _ALREADY:  # by other code, which also has to unpin it
                return None
            if code:
                return f"cudaHostRegister of {size} bytes failed with CUDA error {code}"
            done = weakref.finalize(root, _unpin, self, address, os.getpid())
            done.atexit = False  # the driver may be shut down already when the process exits
            _pinned[address] = done
        return None

    def _clear_error(self) -> None:
        """Take the error that a failed call left in this thread.

        CUDA keeps it until it is asked for. So torch would raise it at the next kernel that the
        caller launches, as if that had failed. torch offers no cudaGetLastError: launch a kernel.
        """
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self.name)

    def allocate(self, size_bytes: int) -> DeviceBytes:
        """Return new memory, aligned to 64 KiB, with undefined content.

        No work that was queued on the device before still uses it.
        """
        with self.using("allocating"):
            room = torch.empty(size_bytes, dtype=torch.uint8, device=self.name)
            if begin := -room.data_ptr() % _GPU_PAGE:  # a part of a larger block of the allocator
                room = torch.empty(size_bytes + _GPU_PAGE, dtype=torch.uint8, device=self.name)
                begin = -room.data_ptr() % _GPU_PAGE
            # torch hands out memory that was freed on this stream before the kernels that use it
            # have run: only later work on the same stream is ordered after them.
            torch.cuda.current_stream(self.index).synchronize()
        return DeviceBytes(room[begin : begin + size_bytes], self)


class CopyStream:
    """An ordered queue of copies, concurrent with the caller's own work on the device.

    It starts after the work queued on the caller's current stream. Safe to use from many threads.
    The memory of a copy must exist until a later `wait` has returned. All methods raise
    TransferError.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        with device.using("opening a stream"):
            self._stream = torch.cuda.Stream(device=device.index)
            self._stream.wait_stream(torch.cuda.current_stream(device.index))

    def copy(self, source: AnyMemory, destination: AnyMemory) -> None:
        """Queue a copy between memories of equal length. At least one is on the device."""
        non_blocking = True
        if isinstance(source, np.ndarray) and not source.flags.writeable:
            # torch.from_numpy warns of read-only memory. The temporary copy must outlive the copy
            # to the device, so this one blocks.
            source, non_blocking = source.copy(), False
        with self._device.using("copying"), torch.cuda.stream(self._stream):
            flat_tensor(destination).copy_(flat_tensor(source), non_blocking=non_blocking)

    def wait(self) -> None:
        """Wait for all copies queued so far. It raises if one failed."""
        with self._device.using("copying"):
            # A blocking event sleeps in `synchronize`; spinning would take a core from the writers.
            event = torch.cuda.Event(blocking=True)
            event.record(self._stream)
            event.synchronize()


def flat_tensor(memory: AnyMemory) -> torch.Tensor:
    """Return a tensor of uint8 on the memory."""
    if isinstance(memory, DeviceBytes):
        tensor: torch.Tensor = memory.tensor
        return tensor
    return torch.from_numpy(memory)


_pinned: dict[int, weakref.finalize[Any, np.ndarray]] = {}
_pinned_lock = threading.RLock()  # the collector may run `_unpin` in a thread that holds it


def _unpin(device: Device, address: int, pid: int) -> None:
    with _pinned_lock:
        _pinned.pop(address, None)
    if os.getpid() == pid:  # a forked child must not use CUDA, and has nothing pinned
        with device.current():
            torch.cuda.cudart().cudaHostUnregister(address)
