"""ResultWriter: a result file that grows by one line per record while the run goes on."""

from __future__ import annotations

import json
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from iobench.errors import ResultFileError
from iobench.results.codec import Record, to_record
from iobench.results.identity import utc_now
from iobench.results.records import End, Run, Sample

__all__ = ["ResultWriter", "check_new", "default_path"]


def default_path(workload_name: str, directory: str | os.PathLike[str] = "results") -> Path:
    """`<directory>/<UTC time>-<workload>.jsonl`, numbered if there already is such a file.

    Creates nothing.
    """
    word = re.sub(r"[^A-Za-z0-9._+-]+", "-", workload_name).strip("-.") or "workload"
    stem = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{word}"
    path, number = Path(directory, f"{stem}.jsonl"), 2
    while path.exists():
        path, number = Path(directory, f"{stem}-{number}.jsonl"), number + 1
    return path


def check_new(path: str | os.PathLike[str]) -> None:
    """Raise ResultFileError where a ResultWriter could not make `path`. Makes nothing itself."""
    wanted = Path(path).absolute()
    if os.path.lexists(wanted):
        raise _exists(path)
    above = next(one for one in wanted.parents if os.path.lexists(one))
    if not above.is_dir():
        raise ResultFileError(f"{path} cannot be created: {above} is no directory")
    if not os.access(above, os.W_OK | os.X_OK, effective_ids=True):
        raise ResultFileError(f"{path} cannot be created: {above} cannot be written")


class ResultWriter:
    """Writes one run's records to a new file; made missing directories included.

        with ResultWriter(path) as results:
            results.write(run)
            results.write(sample)

    Each record is one line handed to the system in one call, so a killed run leaves at most one cut
    line, and a full disk none. On leaving the block an End is written if none was: `complete`,
    `interrupted` (Ctrl-C) or `failed` with the error, and the file is synced. A file to which
    nothing was written is removed.

    Raises ResultFileError when `path` exists (it is never overwritten or appended to by a second
    run) or cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._run: Run | None = None
        self._ended = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(self.path, flags, 0o666)
        except FileExistsError as error:
            raise _exists(error.filename or self.path) from error
        except OSError as error:
            raise ResultFileError(f"{self.path} cannot be created: {error.strerror}") from error

    def write(self, record: Record) -> None:
        """Append `record`. The Run comes first, nothing comes after the End, one run_id for all.

        Raises ResultFileError when the line cannot be written whole; then nothing of it stays.
        """
        if isinstance(record, Run) != (self._run is None) or self._ended:
            raise ValueError(f"a {record.kind} record cannot stand here: run, samples..., end")
        if self._run and record.run_id != self._run.run_id:
            raise ValueError(f"run_id {record.run_id} is not this file's {self._run.run_id}")
        self._append(json.dumps(to_record(record), allow_nan=False) + "\n")
        if isinstance(record, Run):
            self._run = record
        self._ended = isinstance(record, End)

    def close(
        self,
        status: Literal["complete", "interrupted", "failed"] = "complete",
        error: str | None = None,
    ) -> None:
        """Write the End if there is none yet, sync and close. A second call does nothing."""
        if self._fd < 0:
            return
        try:
            if self._run and not self._ended:
                self.write(
                    End(
                        run_id=self._run.run_id,
                        finished_at=utc_now(),
                        status=status,
                        samples=self._count_samples(),
                        error=error,
                    )
                )
            if not self._run:
                self.path.unlink(missing_ok=True)
            os.fsync(self._fd)
        finally:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        elif isinstance(error, KeyboardInterrupt):
            self.close("interrupted")
        else:
            self.close("failed", " ".join(f"{type(error).__name__}: {error}".split()))

    def _count_samples(self) -> int:
        """Those in the file: a count kept beside it would miss one that an interrupt follows."""
        lines = os.pread(self._fd, os.fstat(self._fd).st_size, 0).splitlines()
        return sum(json.loads(line)["kind"] == Sample.kind for line in lines)

    def _append(self, line: str) -> None:
        data = line.encode("ascii")
        before = os.fstat(self._fd).st_size
        try:
            written = os.write(self._fd, data)
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError as error:
            os.ftruncate(self._fd, before)
            raise ResultFileError(f"{self.path} cannot be written: {error.strerror}") from error


def _exists(path: str | os.PathLike[str]) -> ResultFileError:
    return ResultFileError(f"{path} exists and is not overwritten; choose another name")
