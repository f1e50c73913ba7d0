"""`mlperf`: the checkpoints of MLPerf Storage, by DLIO's arithmetic and with its quirks.

Sizes are integer divisions without their remainder. The optimizer is six flat tensors per rank, and
three of them have 5 x hidden_size elements. The first pipeline stage has the embedding, the last
one the output layer. Ranks count tensor parallel first, then pipeline, then data, unlike Megatron.
With pipeline stages the model is saved in one file per layer. Source: argonne-lcf/dlio_benchmark
checkpointing/base_checkpointing.py (get_layer_parameters, get_optimization_groups,
get_layer_index, save_checkpoint) as of 2026-06; configurations: mlcommons/storage
configs/dlio/workload/llama3_*.yaml.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from iobench.workloads.layouts.layout import DTYPES, STEP, Layout, Ranks, torch_file
from iobench.workloads.models.model import Model, Parameter
from iobench.workloads.specs import FileSpec, TensorSpec


@dataclass(frozen=True, kw_only=True)
class MlPerf(Layout):
    """`tensor_parallel` x `pipeline_parallel` x `data_parallel` ranks under ZeRO `zero_stage`."""

    id: ClassVar[str] = "mlperf"
    families: ClassVar[tuple[str, ...]] = ("dlio-llama",)

    tensor_parallel: Ranks = 1
    pipeline_parallel: Ranks = 1
    data_parallel: Ranks = 8
    zero_stage: Annotated[int, Meta(ge=0, le=3)] = 3
    precision: Literal["fp16", "bf16", "fp32"] = "fp16"

    def check(self, model: Model) -> None:
        """Raise ValueError when there are more pipeline stages than layers."""
        super().check(model)
        if self.pipeline_parallel > model.arch.num_layers:
            raise ValueError(
                f"pipeline_parallel is {self.pipeline_parallel}: must be at most num_layers of "
                f"{model.name}, which is {model.arch.num_layers}"
            )

    def rank_class(self, model: Model, rank: int) -> Hashable:
        """The layers that the rank holds and the files that it writes."""
        data, stage = self._coordinates(rank)
        layers = len(self._stage_layers(model, stage))
        first, last = stage == 0, stage == self.pipeline_parallel - 1
        return self._writes_model(data), self._writes_optimizer(data), layers, first, last

    def files(self, model: Model, rank: int) -> tuple[FileSpec, ...]:
        return (*self._model_files(model, rank), *self._optimizer_files(model, rank))

    def _coordinates(self, rank: int) -> tuple[int, int]:
        data, model_rank = divmod(rank, self.tensor_parallel * self.pipeline_parallel)
        return data, model_rank // self.tensor_parallel

    def _writes_model(self, data: int) -> bool:
        return data == 0 or self.zero_stage == 3

    def _writes_optimizer(self, data: int) -> bool:
        return data == 0 or self.zero_stage > 0

    def _path(self, name: str) -> str:
        return f"global_epoch1_step{STEP}/{name}_states.pt"

    def _zero_path(self, rank: int, kind: str) -> str:
        model_parallel = self.tensor_parallel * self.pipeline_parallel
        data, model_rank = divmod(rank, model_parallel)
        return self._path(f"zero_pp_rank_{data}_mp_rank_{model_rank}_{kind}")

    def _model_files(self, model: Model, rank: int) -> Iterator[FileSpec]:
        data, stage = self._coordinates(rank)
        if not self._writes_model(data):
            return
        model_rank = rank % (self.tensor_parallel * self.pipeline_parallel)
        layers = list(self._layers(model, stage))
        if self.zero_stage in (1, 2) and self.pipeline_parallel > 1:
            for index, sizes in layers:
                path = self._path(f"layer_{index}-model_{model_rank}_model")
                yield torch_file(path, self._tensors("", sizes))
            return
        whole = [t for index, sizes in layers for t in self._tensors(f"{index}/", sizes)]
        if self.zero_stage in (1, 2):
            yield torch_file(self._path(f"model_{model_rank}_model"), whole)
        else:
            yield torch_file(self._zero_path(rank, "model"), whole)

    def _optimizer_files(self, model: Model, rank: int) -> Iterator[FileSpec]:
        data, _ = self._coordinates(rank)
        sharers = self.ranks if self.zero_stage else self.tensor_parallel * self.pipeline_parallel
        elements = model.num_parameters // sharers
        if elements and self._writes_optimizer(data):
            sizes = [elements, 5 * model.arch.hidden_size] * 3
            tensors = [
                TensorSpec(name=str(index), dtype="float32", shape=(size,))
                for index, size in enumerate(sizes)
            ]
            yield torch_file(self._zero_path(rank, "optim"), tensors)

    def _stage_layers(self, model: Model, stage: int) -> range:
        """Layers of a stage, numbered from 1; the first stages get the remainder."""
        each, rest = divmod(model.arch.num_layers, self.pipeline_parallel)
        start = stage * each + min(stage, rest) + 1
        return range(start, start + each + (stage < rest))

    def _layers(self, model: Model, stage: int) -> Iterator[tuple[int, list[int]]]:
        """DLIO's layer index (0 the embedding, L+1 and L+2 the head), elements of its tensors."""
        if stage == 0 and model.keep_embedding:
            yield 0, self._elements(model.embedding())
        for index in self._stage_layers(model, stage):
            yield index, self._elements(model.layer(index))
        if stage == self.pipeline_parallel - 1:
            for offset, parameter in enumerate(model.head(), 1):
                yield model.arch.num_layers + offset, self._elements((parameter,))

    def _elements(self, parameters: tuple[Parameter, ...]) -> list[int]:
        sharers = self.data_parallel if self.zero_stage == 3 else 1
        split = (p.split_by(self.tensor_parallel) for p in parameters)
        return [parameter.elements // sharers for parameter in split]

    def _tensors(self, prefix: str, sizes: list[int]) -> list[TensorSpec]:
        dtype = DTYPES[self.precision]
        return [
            TensorSpec(name=f"{prefix}{index}", dtype=dtype, shape=(size,))
            for index, size in enumerate(sizes)
            if size
        ]
