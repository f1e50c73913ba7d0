"""`hf-trainer`: a checkpoint-N directory of transformers' Trainer under DDP with AdamW.

Rank 0 writes everything except the other ranks' rng states. Names: the constants of
transformers/trainer.py (OPTIMIZER_NAME, SCHEDULER_NAME, ...); order: Trainer._save_checkpoint.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import ClassVar, Literal

from pydantic.dataclasses import dataclass

from iobench.workloads.layouts.hf_export import Size, export_files
from iobench.workloads.layouts.layout import (
    CONFIG,
    DTYPES,
    HF_FAMILIES,
    MOE_FAMILIES,
    Layout,
    Ranks,
    raw_file,
    torch_file,
)
from iobench.workloads.models.model import Model
from iobench.workloads.specs import FileSpec, TensorSpec


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class HfTrainer(Layout):
    """Weights in shards, optimizer.pt with two moments and a step per parameter, small files.

    `precision` is the precision of the weights, which torch's AdamW also uses for its moments.
    Mixed precision by autocast is fp32 here.
    """

    id: ClassVar[str] = "hf-trainer"
    families: ClassVar[tuple[str, ...]] = HF_FAMILIES + MOE_FAMILIES

    world_size: Ranks = 1
    precision: Literal["fp32", "bf16"] = "fp32"
    max_shard_size: Size = 5_000_000_000

    def rank_class(self, model: Model, rank: int) -> Hashable:
        del model
        return rank == 0

    def files(self, model: Model, rank: int) -> tuple[FileSpec, ...]:
        """Weights, tokenizer, training_args.bin, optimizer, scheduler, rng, trainer_state.json."""
        rng = raw_file("rng_state.pth" if self.ranks == 1 else f"rng_state_{rank}.pth", 14600)
        if rank:
            return (rng,)
        dtype = DTYPES[self.precision]
        return (
            *export_files(model, dtype, self.max_shard_size),
            *(raw_file(name, size) for name, size in model.tokenizer.items()),
            raw_file("training_args.bin", 6800),
            torch_file("optimizer.pt", _adamw_state(model, dtype)),
            raw_file("scheduler.pt", 1064),
            rng,
            raw_file("trainer_state.json", 10000),
        )


def _adamw_state(model: Model, dtype: str) -> Iterator[TensorSpec]:
    """Yield torch.optim.AdamW.state_dict()["state"]: parameters with weight decay come first."""
    trained = (parameter for parameter in model.parameters() if parameter.trained)
    parameters = sorted(trained, key=lambda parameter: not parameter.decays)
    for index, parameter in enumerate(parameters):
        yield TensorSpec(name=f"state/{index}/step", dtype="float32", shape=())
        for moment in ("exp_avg", "exp_avg_sq"):
            yield TensorSpec(name=f"state/{index}/{moment}", dtype=dtype, shape=parameter.shape)
