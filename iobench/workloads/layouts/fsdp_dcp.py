"""`fsdp-dcp`: FSDP2 with AdamW, saved by torch.distributed.checkpoint (as torchtitan does).

Every parameter and both moments are split along dimension 0 like torch.chunk. Each rank writes its
parts to one file. Every rank has the step scalars, and DCP's dedup_save_plans gives each to the
rank with the least planned data. It visits rank 0's plan first, while the others count as empty. So
the steps are distributed over the other ranks in turn, and rank 0 writes none. Parameter groups and
other plain values, which DCP stores as small pickles, are left out.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import ClassVar, Literal

from pydantic.dataclasses import dataclass

from iobench.workloads.layouts.layout import (
    CONFIG,
    DTYPES,
    HF_FAMILIES,
    Layout,
    Ranks,
    dcp_file,
    dcp_metadata_file,
)
from iobench.workloads.models.model import Model
from iobench.workloads.specs import FileSpec, TensorSpec

__all__ = ["FsdpDcp"]


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class FsdpDcp(Layout):
    """`world_size` ranks. `precision` is that of parameters and moments; the compute may differ.

    With `model_only` the checkpoint has the parameters alone, without optimizer.
    """

    id: ClassVar[str] = "fsdp-dcp"
    families: ClassVar[tuple[str, ...]] = HF_FAMILIES

    world_size: Ranks = 8
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    model_only: bool = False

    @property
    def ranks(self) -> int:
        """World size."""
        return self.world_size

    def rank_class(self, model: Model, rank: int) -> Hashable:
        """Ranks whose parts of every tensor have the same length, and that write as many steps."""
        lengths = {parameter.shape[0] for parameter in model.embedding()}
        lengths |= {p.shape[0] for p in (*model.layer(0), *model.head())}
        parts = tuple(self._part(length, rank) for length in sorted(lengths))
        return rank == 0, parts, len(self._steps(model.num_tensors, rank))

    def files(self, model: Model, rank: int) -> tuple[FileSpec, ...]:
        """__{rank}_0.distcp; rank 0 then writes .metadata."""
        # DCP copies from the GPU in the order of size (filesystem.py, _OverlappingCpuLoader).
        tensors = sorted(self._tensors(model, rank), key=lambda tensor: tensor.size_bytes)
        files = [dcp_file(f"__{rank}_0.distcp", tensors, exact=True)]
        if rank == 0:
            per_tensor = self.world_size if self.model_only else 3 * self.world_size + 1
            chunks = model.num_tensors * per_tensor
            files.append(dcp_metadata_file(".metadata", chunks))
        return tuple(files)

    def _tensors(self, model: Model, rank: int) -> Iterator[TensorSpec]:
        parameters = list(model.parameters())
        steps, dtype = self._steps(len(parameters), rank), DTYPES[self.precision]
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
        if self.model_only:
            return range(0)
        if self.world_size == 1:
            return range(tensors)
        return range(rank - 1, tensors, self.world_size - 1) if rank else range(0)
