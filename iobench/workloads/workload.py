"""Workload: a model, a layout and the sources of its numbers. It computes the files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from iobench.errors import UsageError
from iobench.workloads.models.model import Model
from iobench.workloads.scaling import Scale, scale_model
from iobench.workloads.specs import FileSpec

if TYPE_CHECKING:
    from iobench.workloads.layouts.layout import Layout

__all__ = ["StepTime", "Workload"]


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Duration of one training step of the model, and the source of the measurement."""

    seconds: float
    gpus: int
    hardware: str
    precision: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One checkpoint of a training job: `layout` applied to `model`.

    `step_time` is the published one, on the source's number of GPUs, which may differ from the
    layout's ranks. `scale` describes what was dropped; it is None at full size.
    """

    name: str
    description: str
    model: Model
    layout: Layout
    step_time: StepTime | None = None
    source: str = ""
    scale: Scale | None = None

    def files(self, rank: int = 0) -> tuple[FileSpec, ...]:
        """Return all files that `rank` writes, in write order. Some ranks write no file.

        Raises UsageError when there is no such rank.
        """
        return self.layout.files(self._prepared(rank), rank)

    def size_bytes(self, rank: int = 0) -> int:
        """Return the bytes on storage that `rank` writes. Raises UsageError like `files`."""
        return self.layout.size_bytes(self._prepared(rank), rank)

    def total_size_bytes(self) -> int:
        """Return the bytes on storage of the whole checkpoint, all ranks together."""
        prepared = self.layout.prepare(self.model)
        classes = self.layout.rank_classes(prepared)
        return sum(count * self.layout.size_bytes(prepared, rank) for rank, count in classes)

    @property
    def world_size(self) -> int:
        """Number of ranks of the job, including those that write nothing."""
        return self.layout.ranks

    @property
    def parameters(self) -> int:
        """Exact number of parameters in the layout, such as with a padded vocabulary."""
        return self.layout.prepare(self.model).num_parameters

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of the whole checkpoint per parameter: 2 of bf16 weights, 12 to 14 in training."""
        return self.total_size_bytes() / self.parameters

    def scaled(self, max_bytes: int, rank: int = 0) -> Workload:
        """Return this workload without some blocks, so that `rank` writes at most `max_bytes`.

        Returns itself when it fits. Raises UsageError with the smallest possible size when nothing
        fits.
        """

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
        if not 0 <= rank < self.world_size:
            raise UsageError(
                f"workload {self.name!r} has no rank {rank}: it has 0 to {self.world_size - 1}"
            )
        return self.layout.prepare(self.model)

    def describe(self) -> dict[str, object]:
        """Return model, layout and sources as plain JSON values, without sizes and files."""
        step_time = self.step_time and {
            field: getattr(self.step_time, field) for field in StepTime.__dataclass_fields__
        }
        return {
            "name": self.name,
            "description": self.description,
            "model": self.model.describe(),
            "layout": self.layout.describe(),
            "step_time": step_time,
            "source": self.source,
            "scale": self.scale and self.scale.text,
        }
