"""What a state directory holds, without its lock: for `iobench offload show`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from iobench.offload.files import file_sizes, read_layout
from iobench.offload.layout import StateLayout
from iobench.offload.record_areas import read_records

__all__ = ["FoundGeneration", "FoundState", "inspect"]


@dataclass(frozen=True, kw_only=True)
class FoundGeneration:
    """One generation that has a record."""

    generation: int
    updates: int
    step: int | None
    """The step of its pin."""
    kept: bool
    """Whether it is the newest or pinned: the slots of others may be overwritten at any time."""
    damaged: bool
    time_s: float
    written_bytes: int
    """What its own commit wrote to the data files; the rest are chunks that did not change."""
    elapsed_s: float

    @property
    def rate_bytes_per_s(self) -> float:
        """Bytes written per second; infinite when no time passed."""
        return self.written_bytes / self.elapsed_s if self.elapsed_s else float("inf")


@dataclass(frozen=True, kw_only=True)
class FoundState:
    """A state directory."""

    layout: StateLayout
    reserved_bytes: int
    generations: tuple[FoundGeneration, ...]
    """The newest first."""


def inspect(directory: Path) -> FoundState:
    """Read the layout and the records in `directory`. A trainer may be at work there.

    Raises TargetError when it holds no state, UsageError for a newer format, TransferError.
    """
    layout = read_layout(directory)
    records = read_records(directory, layout)
    pins = {pin.generation: pin.step for pin in (records[0].pins if records else ())}
    newest = next((one.generation for one in records if not one.damaged), None)
    found: dict[int, FoundGeneration] = {}
    for record in records:
        if record.generation in found:
            continue
        own = [n for n, row in enumerate(record.rows) if int(row["written"]) == record.generation]
        found[record.generation] = FoundGeneration(
            generation=record.generation,
            updates=record.updates,
            step=pins.get(record.generation),
            kept=record.generation == newest or record.generation in pins,
            damaged=record.damaged,
            time_s=record.time_s,
            written_bytes=sum(layout.state_bytes(n) + layout.parameter_bytes(n) for n in own),
            elapsed_s=record.elapsed_s,
        )
    return FoundState(
        layout=layout,
        reserved_bytes=sum(file_sizes(layout).values()),
        generations=tuple(found.values()),
    )
