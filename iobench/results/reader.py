"""Reading of a result file: its records, or an error that names the wrong line and the remedy."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iobench.errors import ResultFileError
from iobench.results.codec import Record, from_record
from iobench.results.records import CeilingSample, End, Failure, Run, Sample, TrainBlock
from iobench.text import printable_values

__all__ = ["ResultFile", "family_of", "read", "read_run"]

# Far longer than any record. It keeps a huge file of another kind out of memory.
_LONGEST_LINE_BYTES = 16 * 2**20
_SCHEMA = re.compile(r'\s*\{\s*"schema"\s*:\s*"([\w.]+)/')
_SCHEMA_BYTES = 200
_OTHERS = {
    "iobench.tune/": (
        "a journal of iobench autotune",
        "iobench show {path} prints it, and iobench autotune --resume {path} continues it",
    ),
    "iobench.benchmark/": (
        "a record of a script in benchmarks/",
        "python benchmarks/tables.py {path} prints its table",
    ),
}
"""Files that are next to result files: their schema, what they are, and what to do with them."""


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
        have = f"{len(self.samples)} samples were recorded"
        if self.training:
            have = f"{len(self.training)} training blocks were recorded"
        if self.end is None:
            return f"{self.path} has no end: the run was killed or is still running; {have}"
        if self.end.status == "complete":
            return None
        why = f" ({self.end.error})" if self.end.error else ""
        verb = "was interrupted" if self.end.status == "interrupted" else "failed"
        return f"{self.path}: the run {verb}{why}; {have}"


def family_of(path: Path) -> str:
    """Return the schema of the file's first line without its version; empty if it has none."""
    try:
        with path.open("rb") as file:
            begin = file.readline(_SCHEMA_BYTES).decode("ascii", "replace")
    except OSError:  # the reader reports it
        return ""
    found = _SCHEMA.match(begin)
    return found[1] if found else ""


def read(path: str | os.PathLike[str]) -> ResultFile:
    """Return the records of the file at `path`, with control characters in texts escaped.

    Raises ResultFileError, which names file, line and remedy, if the file is missing, empty, not
    from iobench, of a newer schema, damaged or truncated in the middle of a line.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            return _assemble(path, iter(lambda: file.readline(_LONGEST_LINE_BYTES), b""))
    except FileNotFoundError as error:
        raise ResultFileError(
            f"{path}: no such file; iobench writes its records under results/"
        ) from error
    except IsADirectoryError as error:
        raise ResultFileError(f"{path} is a directory; give a result file (.jsonl)") from error
    except OSError as error:
        raise ResultFileError(f"{path} cannot be read: {error.strerror}") from error


def read_run(path: Path) -> Run | None:
    """Return the header of the result file at `path`; None for a file of another kind."""
    try:
        with path.open("rb") as file:
            record = _parse(path, 1, file.readline(_LONGEST_LINE_BYTES))
    except (OSError, ResultFileError):
        return None
    return record if isinstance(record, Run) else None


def _assemble(path: Path, lines: Iterable[bytes]) -> ResultFile:
    run: Run | None = None
    found: dict[type, list[Any]] = {
        kind: [] for kind in (Sample, CeilingSample, Failure, TrainBlock)
    }
    end: End | None = None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        record = _parse(path, number, line)
        if run is None:
            if not isinstance(record, Run):
                raise _error(path, number, "the run header is missing; restore the first line")
            run = record
        elif isinstance(record, Run):
            raise _error(path, number, "a second run begins; keep each run in a file of its own")
        elif record.run_id != run.run_id:
            raise _error(path, number, f"belongs to run {record.run_id}, not to {run.run_id}")
        elif end is not None:
            raise _error(path, number, "a record after the end; remove this line")
        elif isinstance(record, End):
            end, samples = record, len(found[Sample])
            if end.samples != samples:
                raise _error(
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


def _parse(path: Path, number: int, line: bytes) -> Record:
    try:
        text = line.decode().strip()
        values = _JSON.decode(text)
        if "\\" in text or not text.isprintable():  # other people's text may command a terminal
            values = printable_values(values)
    except (ValueError, RecursionError) as error:
        if number == 1:
            raise _error(path, number, "not JSON; give a .jsonl file that iobench wrote") from error
        if line.endswith(b"\n"):
            raise _error(
                path, number, "damaged, not JSON; take another copy of the file"
            ) from error
        raise _error(
            path,
            number,
            f"cut short, as when a run is killed; to read the lines before it: sed -i '$d' {path}",
        ) from error
    schema = str(values.get("schema")) if isinstance(values, dict) else ""
    for family, (kind, remedy) in _OTHERS.items():
        if schema.startswith(family):
            raise ResultFileError(
                f"{path} is {kind}, not a result file; {remedy.format(path=path)}"
            )
    try:
        return from_record(values)
    except (ValueError, OverflowError) as error:
        raise _error(path, number, str(error)) from error


def _finite(text: str) -> float:
    """Parse a number; reject JSON's NaN and Infinity, and numbers beyond a double."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not finite")
    return number


def _whole(text: str) -> int:
    if len(text) > 19:
        raise ValueError(f"{text:.30} is too large")
    return int(text)


_JSON = json.JSONDecoder(parse_constant=_finite, parse_float=_finite, parse_int=_whole)


def _error(path: Path, number: int, problem: str) -> ResultFileError:
    return ResultFileError(f"{path}, line {number}: {problem}")
