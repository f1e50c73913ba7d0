"""Workload: the files of a checkpoint, computed from a model and a layout, or listed.

A model is scaled to a size limit by dropping whole blocks, so the tensor sizes stay real. When not
even one layer (per pipeline stage) fits, routed experts are dropped, down to eight of each layer.
When that is not enough, the width is divided by a power of two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from iobench.errors import UsageError
from iobench.units import format_size, format_size_exact
from iobench.workloads.models.model import Model
from iobench.workloads.specs import FileSpec, Text

if TYPE_CHECKING:
    from iobench.workloads.layouts.layout import Layout

_FEWEST_EXPERTS = 8  # with fewer, the tensors of a layer are no longer mostly those of experts
_NEAR = 0.95
"""Combinations with at least this fraction of the largest size compete by kinds of blocks."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Description of a scaled workload. Bytes are those that the replayed rank writes."""

    layers: int
    full_layers: int
    embedding: bool = True
    head: bool = True
    experts: int = 0
    """Routed experts of each layer that are kept; 0 for a model without experts."""
    full_experts: int = 0
    width_divisor: int = 1
    size_bytes: int
    full_bytes: int
    limit_bytes: int = 0
    """The most bytes that were asked; the same limit gives the same files in every process."""
    unit: str = "layers"
    """What `layers` counts: "tensors" where the files are listed."""

    @property
    def text(self) -> str:
        """Readable form, such as `2 of 32 layers, no embedding`."""
        parts = [f"{self.layers} of {self.full_layers} {self.unit}"]
        parts += [] if self.embedding else ["no embedding"]
        parts += [] if self.head else ["no head"]
        if self.experts < self.full_experts:
            parts.append(f"{self.experts} of {self.full_experts} experts")
        parts += [f"1/{self.width_divisor} of the width"] if self.width_divisor > 1 else []
        return ", ".join(parts)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Duration of one training step of the model, and the source of the measurement."""

    seconds: Annotated[float, Meta(gt=0, le=1e9)]
    gpus: Annotated[int, Meta(ge=1)]
    hardware: Text
    precision: Text
    source: Text


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


def scale_model(
    model: Model,
    rank_bytes: Callable[[Model], int],
    max_bytes: int,
    *,
    layer_step: int = 1,
    name: str = "",
) -> tuple[Model, Scale]:
    """Return the part of `model` with the largest `rank_bytes` up to `max_bytes`, and its Scale.

    The number of layers is a multiple of `layer_step`. `rank_bytes` raises ValueError for a model
    that the layout cannot hold. Raises UsageError with the smallest possible size when nothing
    fits.
    """
    full_bytes = rank_bytes(model)
    smallest = full_bytes
    try:
        for narrow, divisor in _narrower(model):
            one_layer = narrow.kept(layers=layer_step, embedding=False, head=False)
            try:
                smallest = min(smallest, rank_bytes(one_layer))
            except ValueError:
                if divisor > 1:
                    raise
                continue  # so few experts cannot be divided among the ranks
            if smallest <= max_bytes:
                break
    except ValueError:
        raise UsageError(
            f"workload {name!r} cannot be scaled to {format_size(max_bytes)}: the smallest is "
            f"{format_size_exact(smallest)} ({format_size(smallest)})"
        ) from None
    fitting = _fitting(narrow, rank_bytes, max_bytes, layer_step)
    largest = max(size for size, _ in fitting)
    near = [entry for entry in fitting if entry[0] >= _NEAR * largest]
    size, best = max(
        near, key=lambda entry: (entry[1].keep_embedding + entry[1].keep_head, entry[0])
    )
    return best, Scale(
        layers=best.arch.num_layers,
        full_layers=model.arch.num_layers,
        embedding=best.keep_embedding,
        head=best.keep_head,
        experts=best.arch.num_experts or 0,
        full_experts=model.arch.num_experts or 0,
        width_divisor=divisor,
        size_bytes=size,
        full_bytes=full_bytes,
        limit_bytes=max_bytes,
    )


def _narrower(model: Model) -> Iterator[tuple[Model, int]]:
    """Yield `model` with half as many experts each time, then narrower, and the width's divisor.

    Ends with the ValueError of a width that cannot be divided.
    """
    yield model, 1
    experts = model.arch.num_experts or 0
    while experts >= 2 * _FEWEST_EXPERTS:
        experts //= 2
        model = model.with_experts(experts)
        yield model, 1
    divisor = 1
    while True:
        divisor *= 2
        yield model.shrunk(divisor), divisor


def _fitting(
    model: Model, rank_bytes: Callable[[Model], int], max_bytes: int, layer_step: int
) -> list[tuple[int, Model]]:
    """Return (bytes, model) with the most layers that fit, with and without embedding and head."""
    steps = [*range(layer_step, model.arch.num_layers, layer_step), model.arch.num_layers]
    fitting = []
    for embedding, head in product((True, False), repeat=2):
        best: tuple[int, Model] | None = None
        low, high, next_ = 0, len(steps), 0
        while low < high:  # steps of twice the length first: few layers are quicker to compute
            candidate = model.kept(layers=steps[next_], embedding=embedding, head=head)
            size = rank_bytes(candidate)
            if size <= max_bytes:
                best, low = (size, candidate), next_ + 1
            else:
                high = next_
            next_ = min(2 * low, (low + high) // 2)
        if best:
            fitting.append(best)
    return fitting
