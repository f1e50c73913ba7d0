"""ItemStream: the items of one DCP file, gathered before they reach the writer's stream."""

from __future__ import annotations

import io
from typing import IO, Any, cast

import torch

from iobench.formats import torch_tensor
from iobench.units import KIB, MIB
from iobench.writers.stream import Stream

__all__ = ["ItemStream"]

_AT_ONCE = MIB
_LARGE = 64 * KIB


class ItemStream(io.RawIOBase):
    """Appends items to a stream, up to 1 MiB at once.

    torch makes 39 writes for one tensor. Each call of the stream costs as much as 10 kB. `end`
    passes on the rest and must follow the last item; the serializer's `flush` does not reach the
    file.
    """

    def __init__(self, stream: Stream) -> None:
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
        """Pass on everything. Raises TransferError."""
        held, self._held, self._held_bytes = self._held, [], 0
        if held:
            self._stream.write(b"".join(held))
