"""DrainJournal: what a node knows about the copies of its checkpoints in the remote tier.

TiersStatus: what the local tier and its journal say about them.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import msgspec
import xxhash

from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.retention import readable_manifest
from iobench.checkpoint.store import DirectoryStore
from iobench.errors import UsageError, transfer_errors
from iobench.regular_file import open_own
from iobench.text import parse_json

JOURNAL = ".iobench-drain.jsonl"
"""Its name, in the directory of the checkpoints."""

Event = Literal["remote", "durable", "verified", "dropped", "failed", "saved"]

_KEPT = 1000


@dataclass(frozen=True, kw_only=True)
class DrainEvent:
    """One line of the journal; `at_s` is seconds since the epoch.

    - `remote`: a Checkpointer opens
    - `saved`: the checkpoint was written to local storage: `size_bytes` in `elapsed_s`
    - `durable`: it is in the remote tier; this attempt has sent `sent_bytes` of its `size_bytes` in
      `elapsed_s`, without its pauses for saves
    - `verified`: it was read back from there, and every checksum is that of the manifest
    - `dropped`: it is not copied; `why` says why
    - `failed`: an attempt failed; `why` is the error

    `remote` is the location of the remote tier then. Another version may write other events.
    """

    event: str
    at_s: float
    step: int = -1
    serial: int = 0
    size_bytes: int = 0
    sent_bytes: int = 0
    elapsed_s: float = 0.0
    why: str = ""
    remote: str = ""


class DrainJournal:
    """Lines of JSON, each with a checksum of itself; append-only while a process uses it.

    It is a record and not the truth: which checkpoints exist is what the tiers list, and an unknown
    `verified` only means that a checkpoint is read back again. So lines are not synced, and a line
    that is damaged or cut off is left out.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / JOURNAL

    def read(self) -> tuple[list[DrainEvent], int]:
        """Return the events, oldest first, and how many damaged lines there are between them.

        Raises TransferError, and TargetError for a link and what is not a regular file.
        """
        return _read(self._text())

    def _text(self) -> bytes:
        with transfer_errors("reading", self._path):
            try:
                fd = open_own(self._path, os.O_RDONLY)
            except FileNotFoundError:
                return b""
            with open(fd, "rb") as file:
                return file.read()

    def shorten(self) -> None:
        """Keep the newest 1,000 events if there are more than 2,000, or damaged lines."""
        text = self._text()
        events, damaged = _read(text)
        if not damaged and len(events) <= 2 * _KEPT and text[-1:] in (b"\n", b""):
            return
        with transfer_errors("writing", self._path):
            new = self._path.with_name(f"{JOURNAL}.new")
            new.unlink(missing_ok=True)  # of a process that was killed, or another user's link
            with new.open("x") as file:
                file.writelines(_line(one) for one in events[-_KEPT:])
            new.rename(self._path)

    def add(self, event: DrainEvent) -> None:
        """Append an event. Raises TransferError, for example when the disk is full; TargetError."""
        with transfer_errors("writing", self._path):
            fd = open_own(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                os.write(fd, _line(event).encode())  # one write: whole, or cut off by a kill
            finally:
                os.close(fd)


def _line(event: DrainEvent) -> str:
    text = json.dumps(asdict(event), sort_keys=True, separators=(",", ":"))
    return f"{xxhash.xxh3_64_hexdigest(text.encode())} {text}\n"


def _read(text: bytes) -> tuple[list[DrainEvent], int]:
    lines = [line for line in text.split(b"\n") if line]
    found = [one for one in map(_parsed, lines) if one is not None]
    return found, len(lines) - len(found)


def _parsed(line: bytes) -> DrainEvent | None:
    """Return the event of a line; None if it is damaged or cut off."""
    digest, _, document = line.partition(b" ")
    if xxhash.xxh3_64_hexdigest(document) != digest.decode(errors="replace"):
        return None
    # ValueError: msgspec's too. RecursionError: nested too deep.
    with contextlib.suppress(ValueError, RecursionError):
        return msgspec.convert(parse_json(document), DrainEvent)
    return None


_THERE = ("durable", "verified")


@dataclass(frozen=True, kw_only=True)
class CheckpointCopies:
    """A checkpoint of the local tier, "durable" or "damaged"; `remote` is its state there.

    It is waiting, durable, verified, dropped or failed. `size_bytes`, of its files here, is None
    for a damaged one. `optimizer_bytes` are those of a pinned generation, which is in the directory
    of the optimizer, and in the remote tier too.
    """

    step: int
    size_bytes: int | None
    optimizer_bytes: int
    age_s: float
    local: str
    remote: str


@dataclass(frozen=True, kw_only=True)
class TiersStatus:
    """Both tiers, as the directory and its journal describe them; the remote one is not asked.

    `backlog_s` is the age of the oldest checkpoint that waits for its copy; 0 without one.
    `remote_step` was saved last of those in the remote tier. `failure` is the error of the last
    attempt, if it failed. The `damaged_lines` of the journal are left out.
    """

    directory: str
    remote: str
    checkpoints: tuple[CheckpointCopies, ...]
    backlog_s: float
    local_step: int | None
    remote_step: int | None
    failure: str
    damaged_lines: int

    @property
    def steps_at_risk(self) -> int | None:
        """Steps of training that are lost if the local tier is lost now, at least.

        None when the remote tier has no checkpoint: all of it is lost.
        """
        if self.remote_step is None or self.local_step is None:
            return None
        return max(0, self.local_step - self.remote_step)


def tiers_status(directory: Path) -> TiersStatus:
    """Return the status of the tiers of `directory`. Takes no lock and changes nothing.

    Raises TargetError when there is no such directory, UsageError when it has no journal.
    """
    now_s = time.time()
    store = DirectoryStore(directory)
    steps = store.steps()
    events, damaged = DrainJournal(store.directory).read()
    opened = next((one for one in reversed(events) if one.event == "remote"), None)
    if opened is None:
        raise UsageError(
            f"{directory}: no Checkpointer has copied checkpoints from here; "
            'tiers=[Remote("s3://bucket/run")] copies them'
        )
    events = [one for one in events if one.remote == opened.remote]
    manifests = {step: readable_manifest(store, step) for step in steps}
    last = _last_states(events)
    found = [_copies(step, manifest, last, now_s) for step, manifest in manifests.items()]
    attempts = [one for one in events if one.event in (*_THERE, "failed")]
    there = [(one.serial, one.step) for one in attempts if one.event in _THERE]
    serials = [(one.serial if one else 0, step) for step, one in manifests.items()]
    return TiersStatus(
        directory=str(store),
        remote=opened.remote,
        checkpoints=tuple(found),
        backlog_s=max((one.age_s for one in found if one.remote == "waiting"), default=0.0),
        local_step=max(serials)[1] if serials else None,
        remote_step=max(there)[1] if there else None,
        failure=attempts[-1].why if attempts and attempts[-1].event == "failed" else "",
        damaged_lines=damaged,
    )


def _last_states(events: list[DrainEvent]) -> dict[tuple[int, int], str]:
    """Return the last state of each (step, serial number)."""
    return {
        (one.step, one.serial): "waiting" if one.event == "saved" else one.event
        for one in events
        if one.step >= 0
    }


def _copies(
    step: int, manifest: Manifest | None, last: dict[tuple[int, int], str], now_s: float
) -> CheckpointCopies:
    pinned = manifest.pinned if manifest else ()
    return CheckpointCopies(
        step=step,
        size_bytes=manifest.size_bytes if manifest else None,
        optimizer_bytes=sum(file.size_bytes for one in pinned for file in one.files),
        age_s=max(0.0, now_s - manifest.created_s) if manifest else 0.0,
        local="durable" if manifest else "damaged",
        remote=last.get((step, manifest.serial), "waiting") if manifest else "failed",
    )
