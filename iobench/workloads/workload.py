"""Workload: the files of a checkpoint, computed from a model and a layout, or listed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from iobench.errors import UsageError
from iobench.workloads.models.model import Model
from iobench.workloads.scaling import Scale, scale_model
from iobench.workloads.specs import FileSpec

if TYPE_CHECKING:
    from iobench.workloads.layouts.layout import Layout


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Duration of one training step of the model, and the source of the measurement."""

    seconds: float
    gpus: int
    hardware: str
    precision: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Workload(ABC):
    """One checkpoint of a training job.

    `step_time` is the published one, on the source's number of GPUs, which may differ from the
    number of ranks. `scale` describes what was dropped; it is None at full size. `fingerprint`
    identifies the formats, dtypes and sizes of listed files, whatever their names; "" for a model.
    """

    name: str
    description: str
    step_time: StepTime | None = None
    source: str = ""
    scale: Scale | None = None
    fingerprint: str = ""

    @abstractmethod
    def files(self, rank: int = 0) -> tuple[FileSpec, ...]:
        """Return all files that `rank` writes, in write order. Some ranks write no file.

        Raises UsageError when there is no such rank.
        """

    def size_bytes(self, rank: int = 0) -> int:
        """Return the bytes on storage that `rank` writes. Raises UsageError like `files`."""
        return sum(file.size_bytes for file in self.files(rank))

    def total_size_bytes(self) -> int:
        """Return the bytes on storage of the whole checkpoint, all ranks together."""
        return sum(map(self.size_bytes, range(self.world_size)))

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of ranks of the job, including those that write nothing."""

    @abstractmethod
    def scaled(self, max_bytes: int, rank: int = 0) -> Workload:
        """Return this workload without some tensors, so that `rank` writes at most `max_bytes`.

        Returns itself when it fits. Raises UsageError with the smallest possible size when nothing
        fits.
        """

    def check_rank(self, rank: int) -> None:
        """Raise UsageError when there is no such rank."""
        if not 0 <= rank < self.world_size:
            raise UsageError(
                f"workload {self.name!r} has no rank {rank}: it has 0 to {self.world_size - 1}"
            )


@dataclass(frozen=True, kw_only=True)
class ModelWorkload(Workload):
    """`layout` applied to `model`. Scaling drops blocks of the model."""

    model: Model
    layout: Layout

    def files(self, rank: int = 0) -> tuple[FileSpec, ...]:
        return self.layout.files(self._prepared(rank), rank)

    def size_bytes(self, rank: int = 0) -> int:
        return self.layout.size_bytes(self._prepared(rank), rank)

    def total_size_bytes(self) -> int:
        prepared = self.layout.prepare(self.model)
        classes = self.layout.rank_classes(prepared)
        return sum(count * self.layout.size_bytes(prepared, rank) for rank, count in classes)

    @property
    def world_size(self) -> int:
        return self.layout.ranks

    @property
    def parameters(self) -> int:
        """Exact number of parameters in the layout, such as with a padded vocabulary."""
        return self.layout.prepare(self.model).num_parameters

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of the whole checkpoint per parameter: 2 of bf16 weights, 12 to 14 in training."""
        return self.total_size_bytes() / self.parameters

    def scaled(self, max_bytes: int, rank: int = 0) -> ModelWorkload:
        def rank_bytes(model: Model) -> int:
            prepared = self.layout.prepare(model)
            self.layout.check(prepared)
            return self.layout.size_bytes(prepared, rank)

        if self.size_bytes(rank) <= max_bytes:
            return self
        model, scale = scale_model(
            self.model, rank_bytes, max_bytes, layer_step=self.layout.layer_step, name=self.name
        )
        return replace(self, model=model, scale=scale)

    def _prepared(self, rank: int) -> Model:
        self.check_rank(rank)
        return self.layout.prepare(self.model)
