"""`fsdp-dcp`: FSDP2 with AdamW, saved by torch.distributed.checkpoint (as torchtitan does).

Every parameter and both moments are split along dimension 0 like torch.chunk. Each rank writes its
parts to one file. Every rank has the step scalars, and DCP's dedup_save_plans gives each to the
rank with the least planned data. It visits rank 0's plan first, while the others count as empty. So
the steps are distributed over the other ranks in turn, and rank 0 writes none. FSDP2 does not split
buffers either; they are given to the ranks in the same way, which is an estimate. Parameter groups
and other plain values, which DCP stores as small pickles, are left out.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from iobench.workloads.layouts.layout import (
    DTYPES,
    HF_FAMILIES,
    MOE_FAMILIES,
    Layout,
    Ranks,
    dcp_file,
    dcp_metadata_file,
    single_tensor_archive_bytes,
)
from iobench.workloads.models.model import Model
from iobench.workloads.specs import FileSpec, TensorSpec


@dataclass(frozen=True, kw_only=True)
class FsdpDcp(Layout):
    """`world_size` ranks. `precision` is that of parameters and moments; the compute may differ.

    With `model_only` the checkpoint has the parameters alone, without optimizer.
    """

    id: ClassVar[str] = "fsdp-dcp"
    families: ClassVar[tuple[str, ...]] = HF_FAMILIES + MOE_FAMILIES

    world_size: Ranks = 8
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    model_only: bool = False

    def rank_class(self, model: Model, rank: int) -> Hashable:
        """Ranks whose parts of every tensor have the same length, and that write as many steps."""
        parts = tuple(
            self._part(length, rank) for length in sorted({shape[0] for shape, _ in model.shapes})
        )
        buffers = len(self._turns(model.num_tensors - model.num_trained, rank))
        return rank == 0, parts, len(self._steps(model.num_trained, rank)), buffers

    def files(self, model: Model, rank: int) -> tuple[FileSpec, ...]:
        """__{rank}_0.distcp; rank 0 then writes .metadata."""
        # DCP copies from the GPU in the order of size (filesystem.py, _OverlappingCpuLoader).
        tensors = sorted(self._tensors(model, rank), key=lambda tensor: tensor.size_bytes)
        exact = not model.family.buffers
        files = [dcp_file(f"__{rank}_0.distcp", tensors, exact=exact)]
        if rank == 0:
            files.append(dcp_metadata_file(".metadata", self._chunks(model)))
        return tuple(files)

    def size_bytes(self, model: Model, rank: int) -> int:
        """Return the bytes of the files of `rank`, from the number of tensors of each shape."""
        dtype = DTYPES[self.precision]

        def archive(shape: tuple[int, ...], dtype: str) -> int:
            return single_tensor_archive_bytes(TensorSpec(name="", dtype=dtype, shape=shape))

        total = len(self._steps(model.num_trained, rank)) * archive((), "float32")
        for (shape, trained), count in model.shapes.items():
            if trained:
                part = (self._part(shape[0], rank), *shape[1:])
                total += (1 if self.model_only else 3) * count * archive(part, dtype)
            else:  # all buffers have the same shape
                total += len(self._turns(count, rank)) * archive(shape, dtype)
        if rank == 0:
            total += dcp_metadata_file("", self._chunks(model)).size_bytes
        return total

    def _chunks(self, model: Model) -> int:
        each = self.world_size if self.model_only else 3 * self.world_size + 1
        return model.num_trained * (each - 1) + model.num_tensors

    def _tensors(self, model: Model, rank: int) -> Iterator[TensorSpec]:
        dtype = DTYPES[self.precision]
        everything = list(model.parameters())
        parameters = [parameter for parameter in everything if parameter.trained]
        buffers = [parameter for parameter in everything if not parameter.trained]
        for index in self._turns(len(buffers), rank):
            yield TensorSpec(name=buffers[index].name, dtype=dtype, shape=buffers[index].shape)
        steps = self._steps(len(parameters), rank)
        states = [("", "")]
        if not self.model_only:
            states += [("optimizer.state.", s) for s in (".step", ".exp_avg", ".exp_avg_sq")]
        for prefix, suffix in states:
            for index, parameter in enumerate(parameters):
                name = f"{prefix}{parameter.name}{suffix}"
                if suffix != ".step":
                    part = self._part(parameter.shape[0], rank)
                    shape = (part, *parameter.shape[1:])
                    yield TensorSpec(name=name, dtype=dtype, shape=shape)
                elif index in steps:
                    yield TensorSpec(name=name, dtype="float32", shape=())

    def _part(self, length: int, rank: int) -> int:
        """Length of `rank`'s chunk of a dimension; the last ranks may have less, or 0."""
        chunk = -(-length // self.world_size)
        return max(0, min(chunk, length - rank * chunk))

    def _steps(self, tensors: int, rank: int) -> range:
        """Indices of the parameters whose step scalar `rank` writes."""
        return range(0) if self.model_only else self._turns(tensors, rank)

    def _turns(self, tensors: int, rank: int) -> range:
        """Indices of the tensors that `rank` writes, of those that every rank has."""
        if self.world_size == 1:
            return range(tensors)
        return range(rank - 1, tensors, self.world_size - 1) if rank else range(0)
