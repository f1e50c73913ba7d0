"""ResultWriter: writes a result file, one line per record, during the run."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self

from iobench.errors import ResultFileError, TransferError
from iobench.results.codec import Record, to_record
from iobench.results.identity import utc_now
from iobench.results.records import End, Run, Sample

__all__ = ["ResultWriter", "append_line", "check_new", "default_path"]


def default_path(workload_name: str, directory: str | os.PathLike[str] = "results") -> Path:
    """Return `<directory>/<UTC time>-<workload>.jsonl`, with a number if that file exists.

    Creates nothing.
    """
    word = re.sub(r"[^A-Za-z0-9._+-]+", "-", workload_name).strip("-.") or "workload"
    stem = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{word}"
    path, number = Path(directory, f"{stem}.jsonl"), 2
    while path.exists():
        path, number = Path(directory, f"{stem}-{number}.jsonl"), number + 1
    return path


def check_new(path: str | os.PathLike[str]) -> None:
    """Raise ResultFileError if a ResultWriter could not create `path`. Creates nothing itself."""
    wanted = Path(path).absolute()
    if os.path.lexists(wanted):
        raise _exists(path)
    above = next(one for one in wanted.parents if os.path.lexists(one))
    if not above.is_dir():
        raise ResultFileError(f"{path} cannot be created: {above} is not a directory")
    if not os.access(above, os.W_OK | os.X_OK, effective_ids=True):
        raise ResultFileError(f"{path} cannot be created: {above} is not writable")


class ResultWriter:
    """Writes the records of one run to a new file, and creates missing directories.

        with ResultWriter(path) as results:
            results.write(run)
            results.write(sample)

    Each record is one line, written by one system call. So a killed run leaves at most one
    truncated line, and a full disk none. At the end of the block an End is written if there is none
    yet (`complete`, `interrupted` by Ctrl-C, or `failed` with the error), and the file is synced. A
    file without records is removed.

    Raises ResultFileError if `path` cannot be written, or if it exists: a second run never
    overwrites it or appends to it.
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
        """Append `record`. The Run is first, the End is last, and all have one run_id.

        Raises TransferError if the line cannot be written completely; no part of it stays then.
        """
        if isinstance(record, Run) != (self._run is None) or self._ended:
            raise ValueError(f"a {record.kind} record is out of order: run, samples..., end")
        if self._run and record.run_id != self._run.run_id:
            raise ValueError(f"run_id {record.run_id} is not this file's {self._run.run_id}")
        append_line(self._fd, self.path, to_record(record))
        if isinstance(record, Run):
            self._run = record
        self._ended = isinstance(record, End)

    def close(
        self,
        status: Literal["complete", "interrupted", "failed"] = "complete",
        error: str | None = None,
    ) -> None:
        """Write the End if there is none yet, sync and close. A second call has no effect."""
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

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        elif isinstance(error, KeyboardInterrupt):
            self.close("interrupted")
        else:
            self.close("failed", " ".join(f"{type(error).__name__}: {error}".split()))

    def _count_samples(self) -> int:
        """Count the samples in the file.

        A counter in memory would miss a sample if an interrupt follows its write.
        """
        lines = os.pread(self._fd, os.fstat(self._fd).st_size, 0).splitlines()
        return sum(json.loads(line)["kind"] == Sample.kind for line in lines)


def append_line(fd: int, path: Path, values: Mapping[str, Any]) -> None:
    """Append `values` as one line of JSON. Raises TransferError; no part of it stays then."""
    data = (json.dumps(values, allow_nan=False) + "\n").encode("ascii")
    before = os.fstat(fd).st_size
    try:
        written = os.write(fd, data)
        while written < len(data):
            written += os.write(fd, data[written:])
    except OSError as error:
        os.ftruncate(fd, before)
        raise TransferError.wrap(error, "writing", path) from error


def _exists(path: str | os.PathLike[str]) -> ResultFileError:
    return ResultFileError(f"{path} exists and is not overwritten; choose another name")
