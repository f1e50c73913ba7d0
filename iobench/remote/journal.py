"""DrainJournal: what a node knows about the copies of its checkpoints in the remote tier."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import xxhash

from iobench.errors import TargetError, transfer_errors
from iobench.regular_file import open_regular
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
    "waited",
    "failed",
    "saved",
    "placed",
]

_KEPT = 1000

# Of a line that passes its checksum, and that another program has written all the same.
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
_Number = Annotated[int, msgspec.Meta(ge=-1, le=2**62)]


@dataclass(frozen=True, kw_only=True)
class DrainEvent:
    """One line of the journal; `at_s` is seconds since the epoch.

    - `remote`: the location of the remote tier is `where`; written when a Checkpointer opens; `why`
      is what it does past which lag
    - `saved`: the checkpoint was written to local storage: `size_bytes` in `elapsed_s`
    - `durable`: it is in the remote tier; this attempt has sent `sent_bytes` of its `size_bytes` in
      `elapsed_s`, without its pauses for saves
    - `verified`: it was read back from there, and every checksum is that of the manifest
    - `superseded`: it is not copied; `why` says why
    - `waited`: a save waited `elapsed_s` for copies, because of `why`
    - `placed`: a save went to the tier `where` ("local" or "remote"); `why` says why
    - `failed`: an attempt failed; `why` is the error

    `remote` is the location of the remote tier then. Another version may write other events.
    """

    event: str
    at_s: _Seconds
    step: _Number = -1
    serial: _Number = 0
    size_bytes: _Bytes = 0
    sent_bytes: _Bytes = 0
    elapsed_s: _Seconds = 0.0
    where: str = ""
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
        self._lock = threading.Lock()

    def events(self) -> list[DrainEvent]:
        """Return the events, oldest first. Raises TransferError, TargetError."""
        return self.read()[0]

    def read(self) -> tuple[list[DrainEvent], int]:
        """Return the events, and how many damaged lines there are between them.

        Raises TransferError, also for what is not a regular file, and TargetError for a link.
        """
        return _read(self._text())

    def _text(self) -> bytes:
        with transfer_errors("reading", self._path):
            try:
                fd = self._open(os.O_RDONLY)
            except FileNotFoundError:
                return b""
            with open(fd, "rb") as file:
                return file.read()

    def _open(self, flags: int) -> int:
        """Open the journal; links are refused, symbolic and hard.

        Others may write to the directory of a shared project. A link there could lead to a file of
        this user, and a pipe would block the trainer.
        """
        try:
            fd = open_regular(self._path, flags | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise self._foreign() from error
            raise
        if os.fstat(fd).st_nlink > 1:
            os.close(fd)
            raise self._foreign()
        return fd

    def _foreign(self) -> TargetError:
        return TargetError(f"{self._path}: is a link, so no Checkpointer made it; remove it")

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
        with self._lock, transfer_errors("writing", self._path):
            fd = self._open(os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                os.write(fd, _line(event).encode())  # one write: a kill leaves it whole or cut off
            finally:
                os.close(fd)


def _line(event: DrainEvent) -> str:
    text = json.dumps(asdict(event), sort_keys=True, separators=(",", ":"))
    return f"{xxhash.xxh3_64_hexdigest(text.encode())} {text}\n"


def _read(text: bytes) -> tuple[list[DrainEvent], int]:
    lines = [line for line in text.split(b"\n") if line]
    found = [one for one in map(_parsed, lines) if one is not None]
    return list(_with_remotes(found)), len(lines) - len(found)


def _parsed(line: bytes) -> DrainEvent | None:
    """Return the event of a line; None if it is damaged or cut off."""
    digest, _, document = line.partition(b" ")
    if xxhash.xxh3_64_hexdigest(document) != digest.decode(errors="replace"):
        return None
    # ValueError: msgspec's too. RecursionError: nested too deep.
    with contextlib.suppress(ValueError, RecursionError):
        return msgspec.convert(parse_json(document), DrainEvent)
    return None


def _with_remotes(events: Iterable[DrainEvent]) -> Iterator[DrainEvent]:
    """Add the remote tier to events of versions that named it only when a Checkpointer opened."""
    remote = ""
    for one in events:
        remote = one.where if one.event == "remote" else remote
        yield one if one.remote or not remote else replace(one, remote=remote)
