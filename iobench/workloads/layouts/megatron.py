"""`megatron-legacy` and `megatron-torch-dist`: parallel ranks, and the files of each of them.

Sources: megatron/training/checkpointing.py (get_checkpoint_name,
get_distributed_optimizer_checkpoint_name), megatron/core/optimizer,
megatron/core/dist_checkpointing/strategies/fully_parallel.py and torch.py (thread_count=2), torch
DCP _split_by_size_and_type.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import ClassVar, Literal, NamedTuple

from iobench.workloads.layouts.layout import (
    DTYPES,
    STEP,
    Layout,
    Ranks,
    dcp_file,
    dcp_metadata_file,
    decay_groups,
    raw_file,
    torch_file,
)
from iobench.workloads.models.model import Model, Parameter
from iobench.workloads.specs import FileSpec, TensorSpec

_FILES_PER_RANK = 2
_STATES = ("param", "exp_avg", "exp_avg_sq")


class Coordinates(NamedTuple):
    """Index of a rank in each kind of parallelism."""

    tensor: int
    data: int
    pipeline: int
    expert: int


@dataclass(frozen=True, kw_only=True)
class Megatron(Layout):
    """`tensor_parallel` x `pipeline_parallel` x `data_parallel` ranks, weights in `precision`.

    Ranks count tensor parallel first, then data, then pipeline (megatron/core/parallel_state.py).
    The optimizer keeps fp32 master weights and two fp32 moments: 14 bytes per parameter. The data
    parallel ranks of a stage form groups of `expert_parallel`, which divide the routed experts
    among them; the experts of a rank are split by tensor parallelism like everything else.
    """

    families: ClassVar[tuple[str, ...]] = ("megatron-gpt", "megatron-moe")

    tensor_parallel: Ranks = 1
    pipeline_parallel: Ranks = 1
    data_parallel: Ranks = 1
    expert_parallel: Ranks = 1
    precision: Literal["bf16", "fp16"] = "bf16"

    @property
    def dtype(self) -> str:
        return DTYPES[self.precision]

    def prepare(self, model: Model) -> Model:
        """The vocabulary padded to a multiple of 128 x `tensor_parallel`."""
        return model.padded(model.family.vocab_multiple * self.tensor_parallel)

    def check(self, model: Model) -> None:
        """Raise ValueError when heads, widths or layers do not divide by the parallel ranks."""
        super().check(model)
        arch = model.arch
        if self.data_parallel % self.expert_parallel:
            raise ValueError(
                f"expert_parallel is {self.expert_parallel}: must divide data_parallel, which is "
                f"{self.data_parallel}"
            )
        if self.expert_parallel > 1 and not model.family.has_experts:
            raise ValueError(
                f"expert_parallel is {self.expert_parallel}, but {model.name} has none"
            )
        for name, value, by in (
            ("num_heads", arch.num_heads, "tensor_parallel"),
            ("hidden_size", arch.hidden_size, "tensor_parallel"),
            ("ffn_hidden_size", arch.ffn_hidden_size, "tensor_parallel"),
            ("num_layers", arch.num_layers, "pipeline_parallel"),
            ("num_experts", arch.num_experts or self.expert_parallel, "expert_parallel"),
        ):
            divisor = getattr(self, by)
            if value % divisor:
                raise ValueError(
                    f"{by} is {divisor}: must divide {name} of {model.name}, which is {value}"
                )

    def coordinates(self, rank: int) -> Coordinates:
        """Tensor, data, pipeline and expert parallel rank of `rank`."""
        rest, tensor = divmod(rank, self.tensor_parallel)
        pipeline, data = divmod(rest, self.data_parallel)
        return Coordinates(tensor, data, pipeline, data % self.expert_parallel)

    def stage_kind(self, at: Coordinates) -> tuple[bool, bool]:
        """Whether the stage has the embedding, and whether it has the head."""
        return at.pipeline == 0, at.pipeline == self.pipeline_parallel - 1

    def held(self, model: Model, at: Coordinates) -> Iterator[Parameter]:
        """Return the parameters of a model parallel rank, split, with layers numbered from 0.

        The last stage's copy of the word embedding is not among them; see `output_copy`.
        """
        first, last = self.stage_kind(at)
        layers = model.arch.num_layers // self.pipeline_parallel
        blocks = chain(
            model.embedding() if first else (),
            chain.from_iterable(model.layer(index) for index in range(layers)),
            model.head() if last else (),
        )
        each = (model.arch.num_experts or 0) // self.expert_parallel
        own = range(at.expert * each, (at.expert + 1) * each)
        return (
            parameter.split_by(self.tensor_parallel)
            for parameter in blocks
            if parameter.expert is None or parameter.expert in own
        )

    def output_copy(self, model: Model, at: Coordinates) -> Parameter | None:
        """Return the last stage's output layer if it is a copy of the word embedding; else None."""
        if at.pipeline == 0 or not self.stage_kind(at)[1] or not model.keep_head:
            return None
        if any(parameter.name == "output_layer.weight" for parameter in model.head()):
            return None
        whole = replace(model, keep_embedding=True)
        word_embedding = whole.embedding()[0].split_by(self.tensor_parallel)
        return replace(word_embedding, name="output_layer.weight")

    def path(self, name: str) -> str:
        return f"iter_{STEP:07d}/{name}"

    def tracker(self) -> FileSpec:
        return raw_file("latest_checkpointed_iteration.txt", len(str(STEP)), exact=True)


@dataclass(frozen=True, kw_only=True)
class MegatronLegacy(Megatron):
    """Megatron-LM's torch format: model_optim_rng.pt of each model parallel rank.

    Only data parallel rank 0 writes; with expert parallelism, the first rank of each expert
    parallel rank, which adds the other tensors to its own experts. With `distributed_optimizer` the
    optimizer is gathered to data parallel rank 0, which writes it to distrib_optim.pt as flat
    tensors.
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
    groups = decay_groups(parameters)
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


@dataclass(frozen=True, kw_only=True)
class MegatronTorchDist(Megatron):
    """Megatron-Core's distributed checkpoint, fully parallel save: every rank writes.

    Every data parallel rank saves its own slices of the distributed optimizer. All of them hold the
    weights, which are distributed over them: the largest tensor goes to the least loaded rank. Each
    rank writes two files and distributes its tensors over them in the same way. The first tensor
    parallel rank saves the tensors that all of them hold.
    """

    id: ClassVar[str] = "megatron-torch-dist"

    def rank_class(self, model: Model, rank: int) -> Hashable:
        """The blocks of the stage, the data parallel rank, and whether it is tensor rank 0."""
        del model
        at = self.coordinates(rank)
        return rank == 0, self.stage_kind(at), at.data, at.tensor == 0

    def files(self, model: Model, rank: int) -> tuple[FileSpec, ...]:
        """__{rank}_0.distcp and __{rank}_1.distcp; rank 0 adds the metadata and the tracker."""
        at = self.coordinates(rank)
        parameters = list(self.held(model, at))
        items = [*self._slices(parameters, at), *self._weights(parameters, at)]
        files = [
            dcp_file(self.path(f"__{rank}_{number}.distcp"), bucket, exact=False)
            for number, bucket in enumerate(_deal(items, _FILES_PER_RANK))
        ]
        if rank:
            return tuple(files)
        return (
            *files,
            raw_file(self.path("common.pt"), 20000),
            dcp_metadata_file(self.path(".metadata"), self._chunks(model)),
            raw_file(self.path("metadata.json"), 100),
            self.tracker(),
        )

    def _slices(self, parameters: list[Parameter], at: Coordinates) -> Iterator[TensorSpec]:
        """Yield this rank's part of each flat optimizer buffer, split at parameter boundaries."""
        for held, ranks, index in self._groups(parameters, at):
            share = -(-sum(parameter.elements for parameter in held) // ranks)
            begin, end = index * share, (index + 1) * share
            cursor = 0
            for parameter in held:
                length = min(end, cursor + parameter.elements) - max(begin, cursor)
                cursor += parameter.elements
                if length <= 0 or not _saves(parameter, at):
                    continue
                for state in _STATES:
                    name = f"optimizer.state.{state}.{parameter.name}"
                    yield TensorSpec(name=name, dtype="float32", shape=(length,))

    def _weights(self, parameters: list[Parameter], at: Coordinates) -> list[TensorSpec]:
        """Return the weights that this data parallel rank saves."""
        found: list[TensorSpec] = []
        for held, ranks, index in self._groups(parameters, at):
            saved = (p for p in held if _saves(p, at))
            specs = (TensorSpec(name=p.name, dtype=self.dtype, shape=p.shape) for p in saved)
            found += _deal(specs, ranks)[index]
        return found

    def _groups(
        self, parameters: list[Parameter], at: Coordinates
    ) -> Iterator[tuple[list[Parameter], int, int]]:
        """Yield (parameters, ranks that hold them, index of this rank): experts are a group."""
        shared = [parameter for parameter in parameters if parameter.expert is None]
        yield shared, self.data_parallel, at.data
        if len(shared) < len(parameters):
            experts = [parameter for parameter in parameters if parameter.expert is not None]
            ranks = self.data_parallel // self.expert_parallel
            yield experts, ranks, at.data // self.expert_parallel

    def _chunks(self, model: Model) -> int:
        """Return the number of tensors in all files: weights, and optimizer slices per rank."""
        held = model.num_tensors * self.tensor_parallel
        cuts = (self.data_parallel - 1) * self.tensor_parallel * self.pipeline_parallel
        return held + len(_STATES) * (held + cuts)


def _saves(parameter: Parameter, at: Coordinates) -> bool:
    """Return whether this tensor parallel rank saves the tensor: its own part, or as the first."""
    return parameter.split is not None or at.tensor == 0


def _deal(tensors: Iterable[TensorSpec], buckets: int) -> list[list[TensorSpec]]:
    """Distribute tensors, largest first, each to the bucket with the fewest bytes."""
    dealt: list[list[TensorSpec]] = [[] for _ in range(buckets)]
    loads = [(0, index) for index in range(buckets)]
    for tensor in sorted(tensors, key=lambda tensor: -tensor.size_bytes):
        load, index = loads[0]
        dealt[index].append(tensor)
        heapq.heapreplace(loads, (load + tensor.size_bytes, index))
    return dealt
