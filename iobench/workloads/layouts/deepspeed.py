"""`deepspeed-zero1` to `deepspeed-zero3`: optimizer, and with stage 3 everything, partitioned.

Source: deepspeed/runtime/engine.py, zero/stage_1_and_2.py and zero/stage3.py (_rigid_state_dict,
_create_fp16_sub_groups).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar, Literal

from iobench.workloads.layouts.layout import (
    DTYPES,
    HF_FAMILIES,
    STEP,
    Layout,
    Ranks,
    decay_groups,
    raw_file,
    torch_file,
)
from iobench.workloads.models.model import Model
from iobench.workloads.specs import FileSpec, TensorSpec

_SUB_GROUP_ELEMENTS = 10**9  # DeepSpeed's default sub_group_size, counted in partitioned elements
_PLACEHOLDER_BYTES = 519  # per tensor of model_states: 151 kB for 291 in a published checkpoint


@dataclass(frozen=True, kw_only=True)
class _DeepSpeed(Layout):
    """`world_size` data parallel ranks; 16-bit weights in `precision`, optimizer in fp32."""

    families: ClassVar[tuple[str, ...]] = HF_FAMILIES

    world_size: Ranks = 8
    precision: Literal["bf16", "fp16"] = "bf16"

    def rank_class(self, model: Model, rank: int) -> Hashable:
        """Rank 0, and the others. All partitions are padded to one size."""
        del model
        return rank == 0

    def path(self, name: str) -> str:
        return f"global_step{STEP}/{name}"

    def optimizer_path(self, rank: int) -> str:
        """Path of `rank`'s optimizer partition; bf16 runs have a prefix (engine.py)."""
        prefix = "bf16_" if self.precision == "bf16" else ""
        return self.path(f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")

    def tail(self, rank: int) -> tuple[FileSpec, ...]:
        if rank:
            return ()
        tag = len(f"global_step{STEP}")
        return (raw_file("zero_to_fp32.py", 30000), raw_file("latest", tag, exact=True))


@dataclass(frozen=True, kw_only=True)
class DeepSpeedZero1(_DeepSpeed):
    """Per rank and parameter group three flat fp32 tensors: both moments and the master weights."""

    id: ClassVar[str] = "deepspeed-zero1"

    def files(self, model: Model, rank: int) -> tuple[FileSpec, ...]:
        """mp_rank_00_model_states.pt (rank 0), the rank's optimizer partition, the last files."""
        files = []
        if rank == 0:
            weights = (
                TensorSpec(name=f"module/{p.name}", dtype=DTYPES[self.precision], shape=p.shape)
                for p in model.parameters()
            )
            files.append(torch_file(self.path("mp_rank_00_model_states.pt"), weights))
        files.append(torch_file(self.optimizer_path(rank), self._partition(model)))
        return (*files, *self.tail(rank))

    def _partition(self, model: Model) -> list[TensorSpec]:
        align = 2 * self.world_size  # nccl_start_alignment_factor, in elements
        sizes = []
        for group in filter(None, decay_groups(model.parameters())):
            elements = sum(parameter.elements for parameter in group)
            sizes.append(-(-elements // align) * align // self.world_size)
        state = "optimizer_state_dict/base_optimizer_state/state"
        return _adamw_states(state, "optimizer_state_dict/single_partition_of_fp32_groups", sizes)


@dataclass(frozen=True, kw_only=True)
class DeepSpeedZero2(DeepSpeedZero1):
    """The files of stage 1: gradients, which stage 2 partitions too, are not saved."""

    id: ClassVar[str] = "deepspeed-zero2"


@dataclass(frozen=True, kw_only=True)
class DeepSpeedZero3(_DeepSpeed):
    """Per rank and sub group (at most about 10^9 elements) three flat fp32 tensors.

    The model states have only placeholders, which are replayed as opaque bytes.
    """

    id: ClassVar[str] = "deepspeed-zero3"

    def files(self, model: Model, rank: int) -> tuple[FileSpec, ...]:
        """The rank's model states (placeholders), its optimizer partition, the last files."""
        model_states = self.path(f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        return (
            raw_file(model_states, _PLACEHOLDER_BYTES * model.num_tensors),
            torch_file(self.optimizer_path(rank), self._partition(model)),
            *self.tail(rank),
        )

    def _partition(self, model: Model) -> list[TensorSpec]:
        sizes: list[int] = []
        for group in filter(None, decay_groups(model.parameters())):
            filling = 0
            for parameter in group:
                filling += -(-parameter.elements // self.world_size)
                if filling >= _SUB_GROUP_ELEMENTS:
                    sizes.append(filling)
                    filling = 0
            if filling:
                sizes.append(filling)
        state = "optimizer_state_dict/optimizer_state_dict/state"
        return _adamw_states(state, "optimizer_state_dict/fp32_flat_groups", sizes)


def _adamw_states(state: str, master: str, sizes: list[int]) -> list[TensorSpec]:
    """Return the flat fp32 tensors of AdamW: two moments and the master weights of each size."""
    names = [
        (f"{state}/{index}/{moment}", size)
        for index, size in enumerate(sizes)
        for moment in ("exp_avg", "exp_avg_sq")
    ]
    names += [(f"{master}/{index}", size) for index, size in enumerate(sizes)]
    return [TensorSpec(name=name, dtype="float32", shape=(size,)) for name, size in names]
