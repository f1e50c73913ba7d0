"""Base of the Megatron layouts: parallel ranks, and the parameters that each of them holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import ClassVar, Literal, NamedTuple

from pydantic.dataclasses import dataclass

from iobench.workloads.layouts.layout import CONFIG, DTYPES, STEP, Layout, Ranks, raw_file
from iobench.workloads.models.model import Model, Parameter
from iobench.workloads.specs import FileSpec


class Coordinates(NamedTuple):
    """Index of a rank in each kind of parallelism."""

    tensor: int
    data: int
    pipeline: int
    expert: int


@dataclass(frozen=True, kw_only=True, config=CONFIG)
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
