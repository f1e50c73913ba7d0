"""`megatron-torch-dist`: Megatron-Core's distributed checkpoint, fully parallel save.

Every data parallel rank saves its own slices of the distributed optimizer. All of them hold the
weights, which are distributed over them: the largest tensor goes to the least loaded rank. Each
rank writes two files and distributes its tensors over them in the same way. Sources:
megatron/core/dist_checkpointing/strategies/fully_parallel.py and torch.py (thread_count=2), torch
DCP _split_by_size_and_type.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Iterator
from typing import ClassVar

from pydantic.dataclasses import dataclass

from iobench.workloads.layouts.layout import CONFIG, dcp_file, dcp_metadata_file, raw_file
from iobench.workloads.layouts.megatron import Coordinates, Megatron
from iobench.workloads.models.model import Model, Parameter
from iobench.workloads.specs import FileSpec, TensorSpec

_FILES_PER_RANK = 2
_STATES = ("param", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class MegatronTorchDist(Megatron):
    """Every rank writes. The first tensor parallel rank saves the tensors that all of them hold."""

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
