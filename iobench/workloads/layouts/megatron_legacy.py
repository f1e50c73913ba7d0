"""`megatron-legacy`: Megatron-LM's torch format, one directory per model parallel rank.

Only data parallel rank 0 writes; with expert parallelism, the first rank of each expert parallel
rank, which adds the other tensors to its own experts. Source: megatron/training/checkpointing.py
(get_checkpoint_name, get_distributed_optimizer_checkpoint_name) and megatron/core/optimizer.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

from pydantic.dataclasses import dataclass

from iobench.workloads.layouts.layout import CONFIG, torch_file
from iobench.workloads.layouts.megatron import Coordinates, Megatron
from iobench.workloads.models.model import Model, Parameter
from iobench.workloads.specs import FileSpec, TensorSpec


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class MegatronLegacy(Megatron):
    """model_optim_rng.pt with weights and optimizer.

    With `distributed_optimizer` the optimizer is gathered to data parallel rank 0, which writes it
    to distrib_optim.pt as flat tensors.
    """

    id: ClassVar[str] = "megatron-legacy"

    distributed_optimizer: bool = False

    def rank_class(self, model: Model, rank: int) -> Hashable:
        """The blocks that the stage holds, and whether the rank writes."""
        del model
        at = self.coordinates(rank)
        return rank == 0, at.data == at.expert and self.stage_kind(at)

    def files(self, model: Model, rank: int) -> tuple[FileSpec, ...]:
        """mp_rank_XX[_YYY][_ZZZ]/model_optim_rng.pt, distrib_optim.pt; rank 0 adds the tracker."""
        at = self.coordinates(rank)
        if at.data != at.expert:
            return ()
        parameters = list(self.held(model, at))
        if copy := self.output_copy(model, at):
            parameters.append(copy)
        weights = [
            TensorSpec(name=f"model/{p.name}", dtype=self.dtype, shape=p.shape) for p in parameters
        ]
        directory = self._directory(at)
        if self.distributed_optimizer:
            files = [
                torch_file(f"{directory}/model_optim_rng.pt", weights),
                torch_file(f"{directory}/distrib_optim.pt", _flat_optimizer(parameters)),
            ]
        else:
            state = [*weights, *_optimizer(parameters)]
            files = [torch_file(f"{directory}/model_optim_rng.pt", state)]
        return (*files, self.tracker()) if rank == 0 else tuple(files)

    def _directory(self, at: Coordinates) -> str:
        stage = f"_{at.pipeline:03d}" if self.pipeline_parallel > 1 else ""
        expert = f"_{at.expert:03d}" if self.expert_parallel > 1 else ""
        return self.path(f"mp_rank_{at.tensor:02d}{stage}{expert}")


def _optimizer(parameters: list[Parameter]) -> list[TensorSpec]:
    """Float16OptimizerWithFloat16Params.state_dict(): moments, then fp32 master weights."""
    groups = [[p for p in parameters if p.decays], [p for p in parameters if not p.decays]]
    tensors = []
    for index, parameter in enumerate(groups[0] + groups[1]):
        for moment in ("exp_avg", "exp_avg_sq"):
            name = f"optimizer/optimizer/state/{index}/{moment}"
            tensors.append(TensorSpec(name=name, dtype="float32", shape=parameter.shape))
    for group_index, group in enumerate(groups):
        for index, parameter in enumerate(group):
            name = f"optimizer/fp32_from_fp16_params/{group_index}/{index}"
            tensors.append(TensorSpec(name=name, dtype="float32", shape=parameter.shape))
    return tensors


def _flat_optimizer(parameters: list[Parameter]) -> list[TensorSpec]:
    """DistributedOptimizer.get_parameter_state: the whole gradient buffer's three fp32 tensors."""
    elements = sum(parameter.elements for parameter in parameters)
    return [
        TensorSpec(name=f"0/torch.float32/{key}", dtype="float32", shape=(elements,))
        for key in ("param", "exp_avg", "exp_avg_sq")
    ]
