"""Journal: the measurements of a tuning, one JSON line each, from which a tuning is resumed.

    {"schema": "iobench.tune/1", "kind": "tuning", ...}    the request, the storage, the machine
    {"schema": "iobench.tune/1", "kind": "trial", ...}     one per measurement, in order
    {"schema": "iobench.tune/1", "kind": "end", ...}       how it ended; a resumed tuning appends

Append-only. It does not hold decisions: they follow from the measurements.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from iobench.errors import ResultFileError
from iobench.results import utc_now
from iobench.results.codec import from_plain, to_plain
from iobench.results.writer import append_line
from iobench.text import printable_values
from iobench.tune.measurement import Measurement, Phase, Step
from iobench.tune.space import Candidate

__all__ = [
    "SCHEMA",
    "Journal",
    "TrialRecord",
    "TuningRecord",
    "check_new",
    "read_header",
    "read_journal",
]

SCHEMA = "iobench.tune/1"
_FAMILY, _VERSION = SCHEMA.split("/")
_NEEDED = {
    "asked": ("workload", "target", "objective", "rank", "max_s", "max_bytes"),
    "machine": (
        *("hostname", "kernel", "cpu.model", "cpu.usable_cpus", "memory.total_bytes"),
        "fingerprint",
    ),
}


@dataclass(frozen=True, kw_only=True)
class TuningRecord:
    """The first line: everything that determines which trials a tuning makes."""

    kind: ClassVar[str] = "tuning"

    started_at: str
    command: tuple[str, ...]
    iobench: str
    asked: Mapping[str, Any]
    machine: Mapping[str, Any]
    storage: Mapping[str, Any]
    fingerprint: str
    files_sha256: str = ""
    """Of the workload's files, see `files_digest`; "" in older journals."""

    def check(self) -> None:
        """Raise ValueError that names a fact which every reader of a journal needs."""
        for part, keys in _NEEDED.items():
            facts = getattr(self, part)
            for key in keys:
                _check_has(facts, part, key)
        if self.storage.get("device") is not None:
            _check_has(self.storage, "storage", "device.name")


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """One measurement, with its candidate and its step."""

    kind: ClassVar[str] = "trial"

    phase: Phase
    round: int
    size_bytes: int
    verify: bool
    writer: str
    options: Mapping[str, Any]
    origin: str
    measured: Measurement

    @classmethod
    def of(cls, candidate: Candidate, step: Step, measured: Measurement) -> TrialRecord:
        return cls(
            phase=step.phase,
            round=step.round,
            size_bytes=step.size_bytes,
            verify=step.verify,
            writer=candidate.writer,
            options=candidate.options.to_dict(),
            origin=candidate.origin,
            measured=measured,
        )

    def answers(self, candidate: Candidate, step: Step) -> bool:
        """Return whether this is the measurement of `candidate` in `step`."""
        return self == TrialRecord.of(candidate, step, self.measured)


@dataclass(frozen=True, kw_only=True)
class EndRecord:
    """How one process of a tuning ended."""

    kind: ClassVar[str] = "end"

    at: str
    status: Literal["complete", "interrupted", "failed"]
    error: str | None = None


@dataclass(kw_only=True)
class Journal:
    """An open journal: its records so far, and the file to which more are appended."""

    path: Path
    header: TuningRecord
    trials: tuple[TrialRecord, ...] = ()
    complete: bool = False
    """Whether the tuning has ended with an answer: nothing may be appended then."""
    _fd: int = field(repr=False)

    @classmethod
    @contextmanager
    def create(cls, path: Path, header: TuningRecord) -> Iterator[Journal]:
        """Open a new journal. Raises ResultFileError when the file exists or cannot be created."""
        check_new(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            fd = os.open(path, flags, 0o666)
        except OSError as error:
            raise ResultFileError(f"{path} cannot be created: {error.strerror}") from error
        journal = cls(path=path, header=header, _fd=fd)
        with journal._closing():
            journal._append(header)
            yield journal

    @classmethod
    @contextmanager
    def resume(cls, path: Path) -> Iterator[Journal]:
        """Open the journal in `path` to append to it. Raises ResultFileError for another file.

        An unfinished last line, which a killed process leaves, is removed. A complete journal is
        only read.
        """
        header, trials, whole, complete = _read(path)
        if complete:
            yield cls(path=path, header=header, trials=tuple(trials), complete=True, _fd=-1)
            return
        try:
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            raise ResultFileError(f"{path} cannot be written: {error.strerror}") from error
        journal = cls(path=path, header=header, trials=tuple(trials), _fd=fd)
        with journal._closing():
            os.ftruncate(fd, whole)
            yield journal

    def write(self, record: TrialRecord) -> None:
        """Append one measurement. Raises TransferError, and leaves no part of the line then."""
        self._append(record)

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """Append how the `with` block ended, and close the journal."""
        try:
            yield
        except KeyboardInterrupt:
            self._end("interrupted")
            raise
        except BaseException as error:
            self._end("failed", " ".join(f"{type(error).__name__}: {error}".split()))
            raise
        else:
            self._end("complete")

    def _end(
        self, status: Literal["complete", "interrupted", "failed"], error: str | None = None
    ) -> None:
        try:
            self._append(EndRecord(at=utc_now(), status=status, error=error))
            os.fsync(self._fd)
        finally:
            os.close(self._fd)

    def _append(self, record: TuningRecord | TrialRecord | EndRecord) -> None:
        values = {"schema": SCHEMA, "kind": record.kind, **to_plain(record)}
        append_line(self._fd, self.path, values)


def check_new(path: Path) -> None:
    """Raise ResultFileError when `path` exists: a journal is never overwritten."""
    if path.exists():
        raise ResultFileError(
            f"{path} exists and is not overwritten; go on with it by --resume {path}, or choose "
            "another --journal"
        )


def read_header(path: Path) -> TuningRecord:
    """Return the first line of a journal. Raises ResultFileError for another file."""
    return _read(path)[0]


def read_journal(path: Path) -> tuple[TuningRecord, list[TrialRecord]]:
    """Return header and measurements of the journal in `path`, with control characters escaped.

    Raises ResultFileError.
    """
    header, trials, _, _ = _read(path, printable_values)
    return header, trials


def _read(
    path: Path, clean: Callable[[Any], Any] = lambda values: values
) -> tuple[TuningRecord, list[TrialRecord], int, bool]:
    """Return the header, the trials, the bytes of all complete lines, and whether the tuning is
    complete."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ResultFileError(f"{path} cannot be read: {error.strerror}") from error
    whole = data.rfind(b"\n") + 1
    header: TuningRecord | None = None
    trials: list[TrialRecord] = []
    complete = False
    for number, line in enumerate(data[:whole].splitlines(), 1):
        try:
            values = clean(json.loads(line))
            _check_schema(values)
            if header is None:
                if values.get("kind") != TuningRecord.kind:
                    raise ValueError("the first line is not a header")
                header = from_plain(TuningRecord, values)
                header.check()
            elif values.get("kind") == TrialRecord.kind:
                trials.append(from_plain(TrialRecord, values))
            elif values.get("kind") == EndRecord.kind:
                complete = complete or values.get("status") == "complete"
        except json.JSONDecodeError as error:
            what = "damaged" if header else "give a journal that iobench autotune wrote"
            raise ResultFileError(f"{path}, line {number}: not JSON; {what}") from error
        except (ValueError, RecursionError) as error:
            raise ResultFileError(f"{path}, line {number}: {error}") from error
    if header is None:
        raise ResultFileError(f"{path} is not a journal of iobench autotune: it has no header")
    return header, trials, whole, complete


def _check_has(facts: Any, part: str, key: str) -> None:
    for name in key.split("."):
        if not isinstance(facts, Mapping) or name not in facts:
            raise ValueError(f"{part}.{key} is missing")
        facts = facts[name]


def _check_schema(values: Any) -> None:
    schema = values.get("schema") if isinstance(values, dict) else None
    family, _, version = schema.partition("/") if isinstance(schema, str) else ("", "", "")
    if family != _FAMILY or not version.isdecimal():
        raise ValueError("not a record of a journal of iobench autotune")
    if int(version) > int(_VERSION):
        raise ValueError(
            f"written by a newer iobench (schema {schema}); upgrade iobench to read it"
        )
