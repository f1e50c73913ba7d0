"""`fsdp-dcp`: FSDP2 with AdamW, saved by torch.distributed.checkpoint (as torchtitan does).

Every parameter and both moments are split along dimension 0 as torch.chunk splits it; each rank
writes its parts to one file. The step scalars lie on every rank, and DCP's dedup_save_plans gives
each to the rank with the least data planned so far. It walks through rank 0's plan first, when the
others still count as empty: so all steps go round the other ranks, and rank 0 gets none.
Parameter groups and other plain values, which DCP stores as small pickles, are left out.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import ClassVar

from pydantic.dataclasses import dataclass

from iobench.workloads.layouts.layout import (
    CONFIG,
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
    """`world_size` ranks; parameters and moments in fp32, however the compute is done."""

    id: ClassVar[str] = "fsdp-dcp"
    families: ClassVar[tuple[str, ...]] = HF_FAMILIES

    world_size: Ranks = 8

    @property
    def ranks(self) -> int:
        """World size."""
        return self.world_size

    def rank_class(self, model: Model, rank: int) -> Hashable:
        """Ranks with parts of equal length of every tensor, and as many steps."""
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
            chunks = model.num_tensors * (3 * self.world_size + 1)
            files.append(dcp_metadata_file(".metadata", chunks))
        return tuple(files)

    def _tensors(self, model: Model, rank: int) -> Iterator[TensorSpec]:
        parameters = list(model.parameters())
        steps = self._steps(len(parameters), rank)
        for prefix, suffix in (
            ("", ""),
            ("optimizer.state.", ".step"),
            ("optimizer.state.", ".exp_avg"),
            ("optimizer.state.", ".exp_avg_sq"),
        ):
            for index, parameter in enumerate(parameters):
                name = f"{prefix}{parameter.name}{suffix}"
                if suffix != ".step":
                    part = self._part(parameter.shape[0], rank)
                    shape = (part, *parameter.shape[1:])
                    yield TensorSpec(name=name, dtype="float32", shape=shape)
                elif index in steps:
                    yield TensorSpec(name=name, dtype="float32", shape=())

    def _part(self, length: int, rank: int) -> int:
        """Length of `rank`'s chunk of a dimension: less for the last ranks, even none."""
        chunk = -(-length // self.world_size)
        return max(0, min(chunk, length - rank * chunk))

    def _steps(self, tensors: int, rank: int) -> range:
        """Indices of the parameters whose step scalar `rank` writes."""
        if self.world_size == 1:
            return range(tensors)
        return range(rank - 1, tensors, self.world_size - 1) if rank else range(0)
