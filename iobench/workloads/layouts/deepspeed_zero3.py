"""`deepspeed-zero3`: everything partitioned; only the fp32 flat groups have the weights.

Source: deepspeed/runtime/zero/stage3.py (_rigid_state_dict, _create_fp16_sub_groups).
"""

from __future__ import annotations

from typing import ClassVar

from pydantic.dataclasses import dataclass

from iobench.workloads.layouts.deepspeed import DeepSpeed, adamw_states, groups
from iobench.workloads.layouts.layout import CONFIG, raw_file, torch_file
from iobench.workloads.models.model import Model
from iobench.workloads.specs import FileSpec, TensorSpec

__all__ = ["DeepSpeedZero3"]

_SUB_GROUP_ELEMENTS = 10**9  # DeepSpeed's default sub_group_size, counted in partitioned elements
_PLACEHOLDER_BYTES = 519  # per tensor of model_states: 151 kB for 291 in a published checkpoint


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class DeepSpeedZero3(DeepSpeed):
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
        for group in groups(model):
            filling = 0
            for parameter in group:
                filling += -(-parameter.elements // self.world_size)
                if filling >= _SUB_GROUP_ELEMENTS:
                    sizes.append(filling)
                    filling = 0
            if filling:
                sizes.append(filling)
        state = "optimizer_state_dict/optimizer_state_dict/state"
        return adamw_states(state, "optimizer_state_dict/fp32_flat_groups", sizes)
