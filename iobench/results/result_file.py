"""Result files: ResultWriter writes one during a run, `read` returns its records."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from iobench.errors import ResultFileError
from iobench.results.codec import KINDS, SCHEMA, Record, to_record
from iobench.results.file import RecordFile, ending, line_error, records
from iobench.results.identity import utc_now
from iobench.results.records import CeilingSample, End, EndStatus, Failure, Run, Sample, TrainBlock
from iobench.text import printable


@dataclass(frozen=True, kw_only=True)
class ResultFile:
    """All records of one run. `end` is None if the run was killed before it could write one."""

    path: Path
    run: Run
    samples: tuple[Sample, ...]
    ceiling: tuple[CeilingSample, ...]
    failures: tuple[Failure, ...] = ()
    training: tuple[TrainBlock, ...] = ()
    end: End | None

    @property
    def incomplete(self) -> str | None:
        """Why the run is incomplete; None if it is complete."""
        path = printable(str(self.path))
        have = f"{len(self.samples)} samples were recorded"
        if self.training:
            have = f"{len(self.training)} training blocks were recorded"
        if self.end is None:
            return f"{path} has no end: the run was killed or is still running; {have}"
        if self.end.status == "complete":
            return None
        why = f" ({self.end.error})" if self.end.error else ""
        verb = "was interrupted" if self.end.status == "interrupted" else "failed"
        return f"{path}: the run {verb}{why}; {have}"


def read(path: str | os.PathLike[str]) -> ResultFile:
    """Return the records of the file at `path`, with control characters in texts escaped.

    Raises ResultFileError, which names file, line and remedy, if the file is missing, empty, not
    from iobench, of a newer schema, damaged or truncated in the middle of a line.
    """
    path = Path(path)
    run: Run | None = None
    found: dict[type, list[Any]] = {
        kind: [] for kind in (Sample, CeilingSample, Failure, TrainBlock)
    }
    end: End | None = None
    for number, record in records(path, SCHEMA, KINDS):
        if run is None:
            if not isinstance(record, Run):
                raise line_error(path, number, "the run header is missing; restore the first line")
            run = record
        elif isinstance(record, Run):
            raise line_error(path, number, "a second run begins; keep each run in its own file")
        elif record.run_id != run.run_id:
            raise line_error(path, number, f"belongs to run {record.run_id}, not to {run.run_id}")
        elif end is not None:
            raise line_error(path, number, "a record after the end; remove this line")
        elif isinstance(record, End):
            end, samples = record, len(found[Sample])
            if end.samples != samples:
                raise line_error(
                    path,
                    number,
                    f"the run wrote {end.samples} samples and {samples} are here; "
                    "take an unedited copy of the file",
                )
        else:
            found[type(record)].append(record)
    if run is None:
        raise ResultFileError(f"{path} is empty; the run ended before it measured anything")
    return ResultFile(
        path=path,
        run=run,
        samples=tuple(found[Sample]),
        ceiling=tuple(found[CeilingSample]),
        failures=tuple(found[Failure]),
        training=tuple(found[TrainBlock]),
        end=end,
    )


def read_run(path: Path) -> Run | None:
    """Return the header of the result file at `path`; None for a file of another kind."""
    try:
        _, record = next(records(path, SCHEMA, KINDS), (0, None))
    except ResultFileError:
        return None
    return record if isinstance(record, Run) else None


class RunProgress(Protocol):
    """Receives the progress of a run or of training; `iobench.cli` shows it on stderr."""

    def begin(self, steps: int | None) -> None:
        """Receive the number of steps that follow, of about equal size; None if it is unknown."""

    def step(self, what: str) -> None:
        """Receive the start of a step; the previous step, if any, is done."""

    def result(self, record: Sample | CeilingSample | Failure | TrainBlock) -> None:
        """Receive a record that was written."""


class ResultWriter:
    """Writes the records of one run to a new file, and creates missing directories.

        with ResultWriter(path) as results:
            results.write(run)
            results.write(sample)

    At the end of the block an End is written if there is none yet (`complete`, `interrupted` by
    Ctrl-C, or `failed` with the error), and the file is synced. A file without records is removed.

    Raises ResultFileError if `path` cannot be written, or if it exists: a second run never
    overwrites it or appends to it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._run: Run | None = None
        self._ended = False
        self._file = RecordFile.create(self.path)

    def write(self, record: Record) -> None:
        """Append `record`. The Run is first, the End is last, and all have one run_id.

        Raises TransferError if the line cannot be written completely; no part of it stays then.
        """
        assert isinstance(record, Run) == (self._run is None), "the run is the first record"
        assert not self._ended, "the end is the last record"
        assert self._run is None or record.run_id == self._run.run_id
        if isinstance(record, Run):
            self._run = record  # before: a signal right behind the append finds it
        self._file.append(to_record(record))
        self._ended = isinstance(record, End)

    def close(self, status: EndStatus = "complete", error: str | None = None) -> None:
        """Write the End if there is none yet, sync and close. A second call has no effect."""
        if self._file.closed:
            return
        try:
            if self._file.empty:
                self.path.unlink(missing_ok=True)
            elif self._run and not self._ended:
                self.write(
                    End(
                        run_id=self._run.run_id,
                        finished_at=utc_now(),
                        status=status,
                        samples=self._file.count(Sample.kind),
                        error=error,
                    )
                )
        finally:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        self.close(*ending(error))
