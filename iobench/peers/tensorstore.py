"""peer:tensorstore: one zarr array per tensor in an OCDBT database, the layout of orbax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from iobench.peers.base import Peer, State
from iobench.writers.options import WriterOptions, option

if TYPE_CHECKING:
    import torch

_WORDS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
"""Bytes per element -> type of the stored arrays. They hold the bits of the tensors' elements."""


@dataclass(frozen=True, kw_only=True)
class TensorstoreOptions(WriterOptions):
    """Options of `tensorstore`."""

    concurrency: int = option(16, help="Concurrent file operations.", low=1, high=256)


class Tensorstore(Peer):
    """Uncompressed arrays of one chunk each; tensorstore syncs its files (`file_io_sync`)."""

    name = "tensorstore"
    summary = "TensorStore: zarr arrays in OCDBT, with its own sync"
    syncs = True
    modules = ("tensorstore",)
    packages = "tensorstore"
    Options = TensorstoreOptions
    options: TensorstoreOptions

    def save(self, state: State, path: str) -> None:
        import tensorstore as ts

        context = self._context()
        arrays = {name: _words(tensor) for name, tensor in state.items()}
        opened = {
            name: ts.open(
                _spec(path, name),
                context=context,
                create=True,
                dtype=array.dtype.name,
                shape=array.shape,
                chunk_layout=ts.ChunkLayout(chunk_shape=[max(1, n) for n in array.shape]),
                codec=ts.CodecSpec({"driver": "zarr", "compressor": None}),
            )
            for name, array in arrays.items()
        }
        writes = [
            opened[name].result().write(array, can_reference_source_data_indefinitely=True)
            for name, array in arrays.items()
        ]
        for write in writes:
            write.result()

    def restore(self, path: str, wanted: State) -> State:
        import tensorstore as ts
        import torch

        context = self._context()
        opened = {name: ts.open(_spec(path, name), context=context, open=True) for name in wanted}
        reads = {name: one.result().read() for name, one in opened.items()}
        return {
            name: torch.from_numpy(reads[name].result()).view(tensor.dtype)
            for name, tensor in wanted.items()
        }

    def _context(self) -> Any:
        import tensorstore as ts

        return ts.Context(
            {
                "file_io_concurrency": {"limit": self.options.concurrency},
                "file_io_sync": True,
            }
        )


def _words(tensor: torch.Tensor) -> Any:
    """Return the elements as integers of the same size, without a copy if contiguous."""
    import torch

    return tensor.contiguous().view(getattr(torch, _WORDS[tensor.element_size()])).numpy()


def _spec(path: str, name: str) -> dict[str, Any]:
    base = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path}/"}}
    return {"driver": "zarr", "kvstore": {**base, "path": f"{name}/"}}
