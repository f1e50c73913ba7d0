"""`hf-export` and `hf-trainer`: the files of transformers' save_pretrained and of its Trainer.

save_pretrained writes config files, safetensors shards, index, tokenizer, in this order. The shards
come from the greedy split of huggingface_hub.split_torch_state_dict_into_shards. The Trainer's
names are the constants of transformers/trainer.py (OPTIMIZER_NAME, SCHEDULER_NAME, ...), and the
order that of Trainer._save_checkpoint.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from iobench.workloads.layouts.layout import (
    DTYPES,
    HF_FAMILIES,
    MOE_FAMILIES,
    Layout,
    Ranks,
    index_file,
    raw_file,
    safetensors_file,
    torch_file,
)
from iobench.workloads.models.model import Model
from iobench.workloads.specs import FileSpec, Size, TensorSpec


@dataclass(frozen=True, kw_only=True)
class HfExport(Layout):
    """One process saves only the weights, in shards of at most `max_shard_size` bytes."""

    id: ClassVar[str] = "hf-export"
    families: ClassVar[tuple[str, ...]] = HF_FAMILIES + MOE_FAMILIES

    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    max_shard_size: Size = 5_000_000_000

    def files(self, model: Model, rank: int) -> tuple[FileSpec, ...]:
        del rank
        return (
            *export_files(model, DTYPES[self.precision], self.max_shard_size),
            *(raw_file(name, size) for name, size in model.tokenizer.items()),
        )


def export_files(model: Model, dtype: str, max_shard_size: int) -> Iterator[FileSpec]:
    """Yield config, shards and index of `model` in `dtype`, in the order of save_pretrained."""
    yield raw_file("config.json", 650)
    yield raw_file("generation_config.json", 130)
    tensors = [
        TensorSpec(name=one.name, dtype=dtype, shape=one.shape, split=one.split)
        for one in model.parameters()
    ]
    groups = split_shards(tensors, max_shard_size)
    if len(groups) == 1:
        yield safetensors_file("model.safetensors", groups[0])
        return
    shards = [
        safetensors_file(f"model-{number:05d}-of-{len(groups):05d}.safetensors", group)
        for number, group in enumerate(groups, 1)
    ]
    yield from shards
    yield index_file("model.safetensors.index.json", shards, model.num_parameters)


def split_shards(tensors: Iterable[TensorSpec], max_shard_size: int) -> list[list[TensorSpec]]:
    """Split `tensors` greedily, in state dict order. A tensor above the limit is a shard alone.

    Source: huggingface_hub/serialization/_base.py, split_state_dict_into_shards_factory.
    """
    shards: list[list[TensorSpec]] = []
    current: list[TensorSpec] = []
    current_bytes = 0
    for tensor in tensors:
        size = tensor.size_bytes
        if size > max_shard_size:
            shards.append([tensor])
            continue
        if current_bytes + size > max_shard_size:
            shards.append(current)
            current, current_bytes = [], 0
        current.append(tensor)
        current_bytes += size
    if current:
        shards.append(current)
    return shards


@dataclass(frozen=True, kw_only=True)
class HfTrainer(Layout):
    """A checkpoint-N directory of transformers' Trainer under DDP with AdamW.

    Weights in shards, optimizer.pt with two moments and a step per parameter, small files. Rank 0
    writes everything except the other ranks' rng states.

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
