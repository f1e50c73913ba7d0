"""ItemStream: the items of one DCP file, gathered before they reach the writer's stream.

on_host: these items in host memory, those of a GPU copied ahead.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, Generic, NamedTuple, TypeVar, cast

import torch

from iobench.formats import torch_tensor
from iobench.units import KIB, MIB
from iobench.writers.blocks.interrupt_safe import uninterrupted
from iobench.writers.device.cuda import cuda_device
from iobench.writers.device.staging import DeviceCopies
from iobench.writers.stream import BlockStream

_AT_ONCE = MIB
_LARGE = 64 * KIB
_AHEAD = 64 * MIB
"""Bytes in flight or copied: more than the bus moves while the writer takes one block."""
_T = TypeVar("_T")


def gpu_copies() -> DeviceCopies:
    """Return the copies of tensors of the current GPU, ordered after the work of this thread.

    Without a GPU in use, it copies nothing.
    """
    in_use = torch.cuda.is_initialized()
    return DeviceCopies([cuda_device(torch.device("cuda"))] if in_use else [])


def on_host(
    items: Iterable[_T], resolve: Callable[[_T], Any], copies: DeviceCopies
) -> Iterator[tuple[_T, Any]]:
    """Yield each item with its data, CUDA tensors in host memory.

    They are copied ahead, so that the caller stores one while the next ones are copied.
    """
    ahead: deque[_Ahead[_T]] = deque()
    held_bytes = 0
    for item in items:
        data = source = resolve(item)
        wait = None
        if isinstance(source, torch.Tensor) and source.is_cuda:
            stream = copies.on(cuda_device(source.device))
            data = stream.to_host(source.detach())
            wait = stream.mark()
        size = data.nbytes if isinstance(data, torch.Tensor) else len(data.getbuffer())
        ahead.append(_Ahead(item, data, size, source, wait))
        held_bytes += size
        while ahead and (ahead[0].wait is None or held_bytes > _AHEAD):
            held_bytes -= ahead[0].size_bytes
            yield _arrived(ahead.popleft())
    while ahead:
        yield _arrived(ahead.popleft())


class _Ahead(NamedTuple, Generic[_T]):
    """An item and its data on the host."""

    item: _T
    data: Any
    size_bytes: int
    source: Any
    """The data on the GPU: it must exist until its copy is done."""
    wait: Callable[[], None] | None
    """Waits for this copy; None if nothing is copied."""


def _arrived(one: _Ahead[_T]) -> tuple[_T, Any]:
    if one.wait is not None:
        uninterrupted(one.wait)
    return one.item, one.data


class ItemStream(io.RawIOBase):
    """Appends items to a stream, up to 1 MiB at once.

    torch makes 39 writes for one tensor. Each call of the stream costs as much as 10 kB. `end`
    passes on the rest and must follow the last item; the serializer's `flush` does not reach the
    file.
    """

    def __init__(self, stream: BlockStream) -> None:
        super().__init__()
        self._stream = stream
        self._settings = torch_tensor.settings()
        self._held: list[Any] = []
        self._held_bytes = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._stream.tell() + self._held_bytes

    def write(self, data: Any) -> int:
        """Append `data`, which the caller may change after the return. Raises TransferError."""
        size = len(data)
        if size > _LARGE:
            self.end()
            return self._stream.write(data)
        self._hold(bytes(data))
        return size

    def append(self, data: torch.Tensor | io.BytesIO) -> None:
        """Append the item `data` as stock DCP stores it. Raises TransferError."""
        if isinstance(data, io.BytesIO):
            self.write(data.getbuffer())
            return
        tensor = data.detach().cpu()
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()  # torch.save of a view saves the whole storage
        parts = torch_tensor.file_parts(tensor, self._settings)
        if parts is None:
            torch.save(tensor, cast(IO[bytes], self))
        else:
            self._hold(*parts)

    def _hold(self, *parts: Any) -> None:
        self._held += parts
        self._held_bytes += sum(map(len, parts))
        if self._held_bytes >= _AT_ONCE:
            self.end()

    def end(self) -> None:
        held, self._held, self._held_bytes = self._held, [], 0
        if held:
            self._stream.write(b"".join(held))
