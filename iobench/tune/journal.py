"""Journal: the measurements of a tuning, one JSON line each, from which a tuning is resumed.

    {"schema": "iobench.tune/1", "kind": "tuning", ...}    the request, the storage, the machine
    {"schema": "iobench.tune/1", "kind": "trial", ...}     one per measurement, in order
    {"schema": "iobench.tune/1", "kind": "end", ...}       how it ended; a resumed tuning appends

Append-only. It does not hold decisions: they follow from the measurements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from iobench.environment import Machine, Storage
from iobench.errors import ResultFileError
from iobench.results import utc_now
from iobench.results.codec import to_record
from iobench.results.file import RecordFile, ending, line_error, records
from iobench.results.records import EndStatus, check_time
from iobench.stats.comparison import LEAST_FLOOR
from iobench.tune.budget import Budget
from iobench.tune.objective import Measurement, Objective, Phase, Step
from iobench.tune.space import Candidate, Origin

SCHEMA = "iobench.tune/1"


@dataclass(frozen=True, kw_only=True)
class TuningRequest:
    """What a tuning is asked for, as plain values, which the journal keeps.

    `size_bytes` fixes the size of a confirmation. `largest_bytes` is the size that the first run
    chose: a resumed tuning passes it, because free disk and memory may have changed. Differences up
    to `floor`, a fraction, are noise, by the A/A in `floor_record` if there is one.
    """

    workload: str
    target: str
    objective: str = "save"
    writers: Sequence[str] | None = None
    rank: int = 0
    size_bytes: int | None = None
    max_s: float
    max_bytes: int
    max_memory_bytes: int | None = None
    max_cpu_s_per_gib: float | None = None
    seed: int | None = None
    largest_bytes: int | None = None
    floor: float = LEAST_FLOOR
    floor_record: str | None = None

    def goal(self) -> Objective:
        """Return the objective, with its limits."""
        return Objective(
            goal=self.objective,
            max_memory_bytes=self.max_memory_bytes,
            max_cpu_s_per_gib=self.max_cpu_s_per_gib,
        )

    def budget(self) -> Budget:
        """Return the unspent budget. Raises OptionError if it is empty."""
        return Budget(max_s=self.max_s, max_bytes=self.max_bytes)


@dataclass(frozen=True, kw_only=True)
class TuningRecord:
    """The first line: everything that determines which trials a tuning makes."""

    kind: ClassVar[str] = "tuning"

    started_at: str
    command: tuple[str, ...]
    iobench: str
    asked: TuningRequest
    machine: Machine
    storage: Storage
    fingerprint: str
    files_sha256: str = ""
    """Of the workload's files, see `files_digest`; "" in older journals."""

    def __post_init__(self) -> None:
        check_time("started_at", self.started_at)


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
    origin: Origin
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
    status: EndStatus
    error: str | None = None


KINDS: Mapping[str, type] = {one.kind: one for one in (TuningRecord, TrialRecord, EndRecord)}
"""The classes of the records in a journal."""


@dataclass(kw_only=True)
class Journal:
    """An open journal: its records so far, and the file to which more are appended."""

    path: Path
    header: TuningRecord
    trials: tuple[TrialRecord, ...] = ()
    complete: bool = False
    """Whether the tuning has ended with an answer: nothing may be appended then."""
    _file: RecordFile | None = field(default=None, repr=False)

    @classmethod
    @contextmanager
    def create(cls, path: Path, header: TuningRecord) -> Iterator[Journal]:
        """Open a new journal. Raises ResultFileError when the file exists or cannot be created."""
        check_new(path)
        journal = cls(path=path, header=header, _file=RecordFile.create(path))
        with journal._ending():
            journal.write(header)
            yield journal

    @classmethod
    @contextmanager
    def resume(cls, path: Path) -> Iterator[Journal]:
        """Open the journal in `path` to append to it. Raises ResultFileError for another file.

        An unfinished last line, which a killed process leaves, is removed. A complete journal is
        only read.
        """
        header, trials, complete = _read(path, escaped=False)
        journal = cls(path=path, header=header, trials=tuple(trials), complete=complete)
        if complete:
            yield journal
            return
        journal._file = RecordFile.resume(path)
        with journal._ending():
            yield journal

    def write(self, record: TuningRecord | TrialRecord | EndRecord) -> None:
        """Append one record. Raises TransferError, and leaves no part of the line then."""
        assert self._file is not None  # a complete journal takes none
        self._file.append(to_record(record, SCHEMA))

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Append how the `with` block ended, and close the journal."""
        assert self._file is not None
        try:
            try:
                yield
            except BaseException as error:
                self._end(error)
                raise
            self._end(None)
        finally:
            self._file.close()

    def _end(self, error: BaseException | None) -> None:
        status, text = ending(error)
        self.write(EndRecord(at=utc_now(), status=status, error=text))


def check_new(path: Path) -> None:
    """Raise ResultFileError when `path` exists: a journal is never overwritten."""
    if path.exists():
        raise ResultFileError(
            f"{path} exists and is not overwritten; go on with it by --resume {path}, or choose "
            "another --journal"
        )


def read_header(path: Path) -> TuningRecord:
    """Return the first line of a journal. Raises ResultFileError for another file."""
    return _read(path, escaped=False)[0]


def read_journal(path: Path) -> tuple[TuningRecord, list[TrialRecord]]:
    """Return header and measurements of the journal in `path`, with control characters escaped.

    Raises ResultFileError.
    """
    header, trials, _ = _read(path)
    return header, trials


def _read(path: Path, *, escaped: bool = True) -> tuple[TuningRecord, list[TrialRecord], bool]:
    header: TuningRecord | None = None
    trials: list[TrialRecord] = []
    complete = False
    for number, record in records(path, SCHEMA, KINDS, escaped=escaped, growing=True):
        if header is None:
            if not isinstance(record, TuningRecord):
                raise line_error(path, number, "the first line is not a header")
            header = record
        elif isinstance(record, TrialRecord):
            trials.append(record)
        elif isinstance(record, EndRecord):
            complete = complete or record.status == "complete"
    if header is None:
        raise ResultFileError(f"{path} is not a journal of iobench autotune: it has no header")
    return header, trials, complete
