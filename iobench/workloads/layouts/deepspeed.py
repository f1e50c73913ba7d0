"""Base of the DeepSpeed layouts: their parameters, file names and small files."""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar, Literal

from pydantic.dataclasses import dataclass

from iobench.workloads.layouts.layout import CONFIG, HF_FAMILIES, STEP, Layout, Ranks, raw_file
from iobench.workloads.models.model import Model, Parameter
from iobench.workloads.specs import FileSpec, TensorSpec

__all__ = ["DeepSpeed", "adamw_states", "groups"]


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class DeepSpeed(Layout):
    """`world_size` data parallel ranks; 16-bit weights in `precision`, optimizer in fp32."""

    families: ClassVar[tuple[str, ...]] = HF_FAMILIES

    world_size: Ranks = 8
    precision: Literal["bf16", "fp16"] = "bf16"

    @property
    def ranks(self) -> int:
        """World size."""
        return self.world_size

    def rank_class(self, model: Model, rank: int) -> Hashable:
        """Rank 0, and the others. All partitions are padded to one size."""
        del model
        return rank == 0

    def path(self, name: str) -> str:
        """`name` in the directory of the step."""
        return f"global_step{STEP}/{name}"

    def optimizer_path(self, rank: int) -> str:
        """Path of `rank`'s optimizer partition; bf16 runs have a prefix (engine.py)."""
        prefix = "bf16_" if self.precision == "bf16" else ""
        return self.path(f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")

    def tail(self, rank: int) -> tuple[FileSpec, ...]:
        """The last files of rank 0: zero_to_fp32.py and latest."""
        if rank:
            return ()
        tag = len(f"global_step{STEP}")
        return (raw_file("zero_to_fp32.py", 30000), raw_file("latest", tag, exact=True))


def adamw_states(state: str, master: str, sizes: list[int]) -> list[TensorSpec]:
    """Return the flat fp32 tensors of AdamW: two moments and the master weights of each size."""
    names = [
        (f"{state}/{index}/{moment}", size)
        for index, size in enumerate(sizes)
        for moment in ("exp_avg", "exp_avg_sq")
    ]
    names += [(f"{master}/{index}", size) for index, size in enumerate(sizes)]
    return [TensorSpec(name=name, dtype="float32", shape=(size,)) for name, size in names]


def groups(model: Model) -> list[list[Parameter]]:
    """Return the optimizer's non-empty parameter groups: with and without weight decay."""
    parameters = list(model.parameters())
    both = [[p for p in parameters if p.decays], [p for p in parameters if not p.decays]]
    return [group for group in both if group]
