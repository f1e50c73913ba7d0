"""TiersPlan: a job that saves to tiers, and what a simulation of it says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from iobench.tiers.placement import Placement
from iobench.tiers.remote import OnLag
from iobench.writers.blocks.channel import OnFull

__all__ = ["PlannedMemory", "PlannedSave", "Prediction", "RateChange", "SaveEnd", "TiersPlan"]

SaveEnd = Literal["durable", "superseded", "skipped"]


@dataclass(frozen=True, kw_only=True)
class PlannedMemory:
    """Host memory for snapshots: its size, and the rate of a copy into it."""

    name: str
    size_bytes: int
    rate_bytes_per_s: int


@dataclass(frozen=True, kw_only=True)
class RateChange:
    """From `at_s` seconds after the start on, a rate in bytes per second; 0: no answer."""

    at_s: float
    rate_bytes_per_s: int


@dataclass(frozen=True, kw_only=True)
class TiersPlan:
    """A job that saves `saves` checkpoints of `size_bytes`, one after every `every_s` of training.

    - `memories`: the fastest one first. Each snapshot takes the fastest free slot; the last slot of
      a memory may be spread over it and the next
    - `local_rate`, `remote_rate`: bytes per second until durable; without a remote tier None
    - `local_latency_s`, `remote_latency_s`: what each save, copy or read-back takes longer than its
      bytes
    - `in_flight_bytes`: when a save begins, so many bytes of a copy are under way, and go on
    - `read_back_rate`: of copies that are read back; None: the rate of the remote tier then
    - `remote_changes`: later rates of the remote tier, in order of time
    - `timeout_s`: a request to a remote tier that does not answer fails after so long
    - `placement`: chooses the tier of each save; None: all are written to the local tier
    - `on_full`, `every_save`, `on_lag`, `max_lag_s`, `max_lag_bytes`: like the options of
      Checkpointer and Remote
    - `keep_last`: the remote tier keeps so many checkpoints, KeepLast; None: all
    """

    size_bytes: int
    every_s: float
    saves: int
    memories: tuple[PlannedMemory, ...]
    local_rate: int
    remote_rate: int | None = None
    local_latency_s: float = 0.0
    remote_latency_s: float = 0.0
    in_flight_bytes: int = 0
    read_back_rate: int | None = None
    remote_changes: tuple[RateChange, ...] = ()
    timeout_s: float = 60.0
    placement: Placement | None = None
    on_full: OnFull = "wait"
    every_save: bool = False
    on_lag: OnLag = "supersede"
    max_lag_s: float = 3600.0
    max_lag_bytes: int | None = None
    keep_last: int | None = None

    def slots(self) -> list[tuple[int, ...]]:
        """Return the bytes of each slot in each memory, the fastest slot first."""
        found: list[tuple[int, ...]] = []
        free = [one.size_bytes for one in self.memories]
        for _ in range(sum(free) // self.size_bytes):
            left, parts = self.size_bytes, list[int]()
            for number, room in enumerate(free):
                parts.append(min(left, room))
                left -= parts[-1]
                free[number] -= parts[-1]
            found.append(tuple(parts))
        return found

    @property
    def synchronous(self) -> bool:
        """Whether a snapshot does not fit into memory, so that every save is synchronous."""
        return not self.slots()


@dataclass(frozen=True, kw_only=True)
class PlannedSave:
    """One save of a simulation. Times are seconds from the start of the job.

    It begins at `at_s`, after `trained_s` of training. `end` is "superseded" for a snapshot that
    was dropped for a newer one, "skipped" for one that was never taken. It was written to `tier`,
    "local" or "remote". It is durable in the local tier at `local_s` and in the remote tier at
    `remote_s`; None: never. `used` are the bytes that snapshots take in each memory after the copy.
    """

    number: int
    at_s: float
    trained_s: float
    lag_wait_s: float = 0.0
    memory_wait_s: float = 0.0
    copy_s: float = 0.0
    end: SaveEnd = "durable"
    tier: str = ""
    local_s: float | None = None
    remote_s: float | None = None
    used: tuple[int, ...] = ()

    @property
    def stall_s(self) -> float:
        """How long training waits: for the lag, for memory, and for the copy."""
        return self.lag_wait_s + self.memory_wait_s + self.copy_s

    @property
    def durable_s(self) -> float | None:
        """When it is durable in one of the tiers; None: never."""
        return min((one for one in (self.local_s, self.remote_s) if one is not None), default=None)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a simulation found; `ended_s` is when everything was durable, or given up.

    `lost_node_s` and `lost_local_s` are seconds of training that are lost at the worst moment
    between the first save and the last one: if the node fails, so that the newest durable
    checkpoint is left, and if the local tier does, so that the newest remote one is left. None
    without a remote tier.
    """

    plan: TiersPlan
    saves: tuple[PlannedSave, ...]
    ended_s: float
    lost_node_s: float
    lost_local_s: float | None

    @property
    def stalls_s(self) -> list[float]:
        """The stall of each save."""
        return [one.stall_s for one in self.saves]

    @property
    def lags_s(self) -> list[float]:
        """Seconds from each save until it is durable in one of the tiers, of those that are."""
        return [one.durable_s - one.at_s for one in self.saves if one.durable_s is not None]

    @property
    def lags_local_s(self) -> list[float]:
        """Seconds from each save to its durable local checkpoint, of those that have one."""
        return [one.local_s - one.at_s for one in self.saves if one.local_s is not None]

    @property
    def lags_remote_s(self) -> list[float]:
        """Seconds from each save to its durable remote copy, of those that have one."""
        return [one.remote_s - one.at_s for one in self.saves if one.remote_s is not None]

    def first_full(self) -> int | None:
        """Return the number of the first save that found all memory full; None if none did."""
        for one in self.saves:
            if one.memory_wait_s or one.end == "skipped":
                return one.number
        return None

    def first_use(self, memory: int) -> int | None:
        """Return the number of the first save that needed memory tier `memory`."""
        return next((one.number for one in self.saves if one.used and one.used[memory]), None)
