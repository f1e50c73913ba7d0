"""`deepspeed-zero1` and `deepspeed-zero2`: all weights on rank 0, the optimizer partitioned.

Both stages write the same files. Source: deepspeed/runtime/engine.py and zero/stage_1_and_2.py.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic.dataclasses import dataclass

from iobench.workloads.layouts.deepspeed import DeepSpeed, adamw_states, groups
from iobench.workloads.layouts.layout import CONFIG, DTYPES, torch_file
from iobench.workloads.models.model import Model
from iobench.workloads.specs import FileSpec, TensorSpec

__all__ = ["DeepSpeedZero1", "DeepSpeedZero2"]


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class DeepSpeedZero1(DeepSpeed):
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
        for group in groups(model):
            elements = sum(parameter.elements for parameter in group)
            sizes.append(-(-elements // align) * align // self.world_size)
        state = "optimizer_state_dict/base_optimizer_state/state"
        return adamw_states(state, "optimizer_state_dict/single_partition_of_fp32_groups", sizes)


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class DeepSpeedZero2(DeepSpeedZero1):
    """The files of stage 1: gradients, which stage 2 partitions too, are not saved."""

    id: ClassVar[str] = "deepspeed-zero2"
