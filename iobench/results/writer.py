"""ResultWriter: writes a result file, one line per record, during the run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from iobench.results.codec import Record, to_record
from iobench.results.file import RecordFile, Status, ending
from iobench.results.identity import utc_now
from iobench.results.records import End, Run, Sample

__all__ = ["ResultWriter"]


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
        if isinstance(record, Run) != (self._run is None) or self._ended:
            raise ValueError(f"a {record.kind} record is out of order: run, samples..., end")
        if self._run and record.run_id != self._run.run_id:
            raise ValueError(f"run_id {record.run_id} is not this file's {self._run.run_id}")
        self._file.append(to_record(record))
        if isinstance(record, Run):
            self._run = record
        self._ended = isinstance(record, End)

    def close(self, status: Status = "complete", error: str | None = None) -> None:
        """Write the End if there is none yet, sync and close. A second call has no effect."""
        if self._file.closed:
            return
        try:
            if self._run and not self._ended:
                self.write(
                    End(
                        run_id=self._run.run_id,
                        finished_at=utc_now(),
                        status=status,
                        samples=self._file.count(Sample.kind),
                        error=error,
                    )
                )
            if not self._run:
                self.path.unlink(missing_ok=True)
        finally:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        self.close(*ending(error))
