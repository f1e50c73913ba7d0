"""DrainJournal: what a node knows about the copies of its checkpoints in the remote tier."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import xxhash

from iobench.errors import transfer_errors
from iobench.regular_file import open_regular, read_regular
from iobench.text import parse_json

__all__ = ["JOURNAL", "DrainEvent", "DrainJournal"]

JOURNAL = ".iobench-drain.jsonl"
"""Its name, in the directory of the checkpoints."""

Event = Literal[
    "remote",
    "waiting",
    "durable",
    "verified",
    "superseded",
    "skipped",
    "waited",
    "failed",
    "saved",
    "placed",
]

_KEPT = 1000


@dataclass(frozen=True, kw_only=True)
class DrainEvent:
    """One line of the journal; `at_s` is seconds since the epoch.

    - `remote`: the location of the remote tier is `where`; written when a Checkpointer opens; `why`
      is what it does past which lag
    - `saved`: the checkpoint was written to local storage: `size_bytes` in `elapsed_s`
    - `durable`: it is in the remote tier; this attempt has sent `sent_bytes` of its `size_bytes` in
      `elapsed_s`, without its pauses for saves
    - `verified`: it was read back from there, and every checksum is that of the manifest
    - `superseded`, `skipped`: it is not copied; `why` says why
    - `waited`: a save waited `elapsed_s` for copies, because of `why`
    - `placed`: a save went to the tier `where` ("local" or "remote"); `why` says why
    - `failed`: an attempt failed; `why` is the error
    """

    event: Event
    at_s: float
    step: int = -1
    serial: int = 0
    size_bytes: int = 0
    sent_bytes: int = 0
    elapsed_s: float = 0.0
    where: str = ""
    why: str = ""


_FIELDS = {one.name for one in fields(DrainEvent)}


class DrainJournal:
    """Lines of JSON, each with a checksum of itself; append-only while a process uses it.

    It is a record and not the truth: which checkpoints exist is what the tiers list, and an unknown
    `verified` only means that a checkpoint is read back again. So lines are not synced, and a line
    that is damaged or cut off is left out.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / JOURNAL
        self._lock = threading.Lock()

    def events(self) -> list[DrainEvent]:
        """Return the undamaged events, oldest first; none when there is no journal."""
        with transfer_errors("reading", self._path):
            try:
                text = read_regular(self._path)
            except FileNotFoundError:
                return []
        return list(_parsed(text))

    def shorten(self) -> None:
        """Keep the newest 1,000 events if there are more than 2,000, or damaged lines."""
        with transfer_errors("writing", self._path):
            if not self._path.exists():
                return
            text = read_regular(self._path)
            events = list(_parsed(text))
            lines = text.count(b"\n")
            if len(events) == lines <= 2 * _KEPT and text.endswith(b"\n"):
                return
            new = self._path.with_name(f"{JOURNAL}.new")
            new.write_text("".join(_line(one) for one in events[-_KEPT:]))
            new.rename(self._path)

    def add(self, event: DrainEvent) -> None:
        """Append an event. Raises TransferError, for example when the disk is full."""
        with self._lock, transfer_errors("writing", self._path):
            fd = open_regular(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                os.write(fd, _line(event).encode())  # one write: a kill leaves it whole or cut off
            finally:
                os.close(fd)


def _line(event: DrainEvent) -> str:
    text = json.dumps(asdict(event), sort_keys=True, separators=(",", ":"))
    return f"{xxhash.xxh3_64_hexdigest(text.encode())} {text}\n"


def _parsed(text: bytes) -> Iterator[DrainEvent]:
    for line in text.split(b"\n"):
        digest, _, document = line.partition(b" ")
        if not document or xxhash.xxh3_64_hexdigest(document) != digest.decode(errors="replace"):
            continue
        with contextlib.suppress(ValueError, TypeError):
            found: dict[str, Any] = parse_json(document)
            yield DrainEvent(**{key: value for key, value in found.items() if key in _FIELDS})
