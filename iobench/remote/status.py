"""TiersStatus: what the local tier and its journal say about the copies of its checkpoints."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.retention import readable_manifest
from iobench.checkpoint.store import DirectoryStore
from iobench.errors import UsageError, transfer_errors
from iobench.remote.journal import DrainEvent, DrainJournal
from iobench.remote.rates import Estimate, Observation, estimate

__all__ = ["CheckpointCopies", "Placed", "TiersStatus", "tiers_status"]

_RATES = 16
_DECISIONS = 10
_THERE = ("durable", "verified")


@dataclass(frozen=True, kw_only=True)
class CheckpointCopies:
    """A checkpoint of the local tier. `remote` is the last state in the journal.

    It is waiting, durable, verified, superseded or failed. `size_bytes`, of its files
    here, is None for a damaged one. `optimizer_bytes` are those of a pinned generation, which is in
    the directory of the optimizer, and in the remote tier too.
    """

    step: int
    serial: int | None
    size_bytes: int | None
    age_s: float
    remote: str
    optimizer_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Placed:
    """The tier to which the save of `step` went, "local" or "remote", `age_s` ago, and why."""

    step: int
    tier: str
    why: str
    age_s: float


@dataclass(frozen=True, kw_only=True)
class TiersStatus:
    """Both tiers, as the directory and its journal describe them; the remote one is not asked.

    Rates are seconds per byte of recent saves and copies; None before the first one. `lag_s` is the
    age of the oldest checkpoint that waits for its copy; 0 without one. `remote_step` was saved
    last of those in the remote tier. `failure` is the error of the last attempt, if it failed.
    `decisions` are the last 10 of a placement, oldest first. `past_lag` says what happens past
    which lag; `superseded` and `waits` count how often it did, as far as the journal goes back, and
    saves have waited `waited_s` in all. `superseded` also counts copies that the retention there
    would not keep. All of it is about this remote tier; the `damaged_lines` of the journal are left
    out.
    """

    directory: str
    remote: str
    free_bytes: int
    checkpoints: tuple[CheckpointCopies, ...]
    local_rate: Estimate | None
    remote_rate: Estimate | None
    lag_s: float
    local_step: int | None
    remote_step: int | None
    failure: str
    past_lag: str
    superseded: int
    waits: int
    waited_s: float
    damaged_lines: int
    decisions: tuple[Placed, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all checkpoints in the local tier."""
        return sum(one.size_bytes or 0 for one in self.checkpoints)

    @property
    def steps_at_risk(self) -> int | None:
        """Steps of training that are lost if the local tier is lost now, at least.

        None when the remote tier has no checkpoint: all of it is lost.
        """
        if self.remote_step is None or self.local_step is None:
            return None
        return max(0, self.local_step - self.remote_step)


def tiers_status(directory: Path, *, now_s: float | None = None) -> TiersStatus:
    """Return the status of the tiers of `directory`. Takes no lock and changes nothing.

    Raises TargetError when there is no such directory, UsageError when it has no journal.
    """
    now_s = time.time() if now_s is None else now_s
    store = DirectoryStore(directory)
    steps = store.steps()
    events, damaged = DrainJournal(store.directory).read()
    opened = next((one for one in reversed(events) if one.event == "remote"), None)
    if opened is None:
        raise UsageError(
            f"{directory}: no Checkpointer has copied checkpoints from here, and no process of "
            'this user here holds memory of this run; tiers=[Remote("s3://bucket/run")] copies them'
        )
    saved = [one for one in events if one.event == "saved"]
    events = [one for one in events if one.remote == opened.where]
    last = _last_states(events)
    found = [_copies(step, readable_manifest(store, step), last, now_s) for step in steps]
    there = [one for one in events if one.event in _THERE]
    with transfer_errors("measuring", store.directory):
        room = os.statvfs(store.directory)
    attempts = [one for one in events if one.event in (*_THERE, "failed")]
    failed = attempts[-1] if attempts and attempts[-1].event == "failed" else None
    return TiersStatus(
        directory=str(store),
        remote=opened.where,
        free_bytes=room.f_bavail * room.f_frsize,
        checkpoints=tuple(found),
        local_rate=_rate("local", [(one, one.size_bytes) for one in saved]),
        remote_rate=_rate("remote", [(one, one.sent_bytes) for one in there]),
        lag_s=max((one.age_s for one in found if one.remote == "waiting"), default=0.0),
        local_step=_last_saved([(one.serial or 0, one.step) for one in found]),
        remote_step=_last_saved([(one.serial, one.step) for one in there]),
        failure=failed.why if failed else "",
        past_lag=opened.why,
        superseded=sum(one.event == "superseded" for one in events),
        waits=sum(one.event == "waited" for one in events),
        waited_s=sum(one.elapsed_s for one in events if one.event == "waited"),
        damaged_lines=damaged,
        decisions=tuple(
            Placed(step=one.step, tier=one.where, why=one.why, age_s=max(0.0, now_s - one.at_s))
            for one in [one for one in events if one.event == "placed"][-_DECISIONS:]
        ),
    )


def _last_states(events: list[DrainEvent]) -> dict[tuple[int, int], str]:
    """Return the last state of each (step, serial number)."""
    states: dict[tuple[int, int], str] = {}
    for one in events:
        if one.step >= 0:
            states[one.step, one.serial] = "waiting" if one.event == "saved" else one.event
    return states


def _copies(
    step: int, manifest: Manifest | None, last: dict[tuple[int, int], str], now_s: float
) -> CheckpointCopies:
    if manifest is None:
        return CheckpointCopies(step=step, serial=None, size_bytes=None, age_s=0.0, remote="failed")
    return CheckpointCopies(
        step=step,
        serial=manifest.serial,
        size_bytes=manifest.size_bytes,
        optimizer_bytes=sum(file.size_bytes for one in manifest.pinned for file in one.files),
        age_s=max(0.0, now_s - manifest.created_s),
        remote=last.get((step, manifest.serial), "waiting"),
    )


def _rate(tier: str, events: list[tuple[DrainEvent, int]]) -> Estimate | None:
    return estimate(
        [
            Observation(tier=tier, at_s=one.at_s, size_bytes=size, elapsed_s=one.elapsed_s)
            for one, size in events
            if size and one.elapsed_s > 0
        ][-_RATES:]
    )


def _last_saved(found: list[tuple[int, int]]) -> int | None:
    return max(found)[1] if found else None
