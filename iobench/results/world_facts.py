"""WorldFacts: the ranks of a run, their nodes and their clocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["WorldFacts"]


@dataclass(frozen=True, kw_only=True)
class WorldFacts:
    """The ranks that a launcher started, by rank where a field has several values.

    `interface` is the network interface of rank 0. `restored_from` is the rank whose files each
    rank restores. `clock_offset_s` was added to the monotonic clock of each rank to get that of
    rank 0, and is at most `clock_error_s` wrong.
    """

    launcher: str
    size: int
    nodes: int
    hosts: tuple[str, ...]
    node: tuple[int, ...]
    interface: str | None
    restored_from: tuple[int, ...]
    clock_offset_s: tuple[float, ...]
    clock_error_s: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("hosts", "node", "restored_from", "clock_offset_s", "clock_error_s"):
            found: Sequence[object] = getattr(self, name)
            if len(found) != self.size:
                raise ValueError(f"{name} must have {self.size} values, and has {len(found)}")

    def named(self, rank: int) -> str:
        """Return `rank 5 (host b)`."""
        return f"rank {rank} (host {self.hosts[rank]})"
