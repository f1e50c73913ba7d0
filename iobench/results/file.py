"""RecordFile: a file of JSON Lines that is only appended to. Each line is one record.

    {"schema": "iobench.result/1", "kind": "sample", ...}

Result files, journals of autotune and the records of scripts in benchmarks/ are record files.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from iobench.errors import ResultFileError, TransferError
from iobench.results.codec import from_record
from iobench.results.records import EndStatus
from iobench.text import one_line, printable_values

_FILES = {
    "iobench.result": ("an iobench result file", "iobench show {path} prints it"),
    "iobench.tune": (
        "a journal of iobench autotune",
        "iobench show {path} prints it, and iobench autotune --resume {path} continues it",
    ),
    "iobench.benchmark": (
        "a record of a script in benchmarks/",
        "python benchmarks/tables.py {path} prints its table",
    ),
}
"""Every family of schemas: what its files are, and what to do with them."""

# Far longer than any record. It keeps a huge file of another kind out of memory.
_LONGEST_LINE_BYTES = 16 * 2**20
_SCHEMA = re.compile(r'\s*\{\s*"schema"\s*:\s*"([\w.]+)/')
_SCHEMA_BYTES = 200


class RecordFile:
    """An open record file.

    Each record is one line, written by one system call. So a killed process leaves at most one
    unfinished line, and a full disk none.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self._fd = path, fd

    @classmethod
    def create(cls, path: Path) -> Self:
        """Create the file, and missing directories. Raises ResultFileError, also if it exists."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            return cls(path, os.open(path, flags, 0o666))
        except OSError as error:
            if os.path.lexists(path):
                raise _exists(path) from error
            raise ResultFileError(f"{path} cannot be created: {error.strerror}") from error

    @classmethod
    def resume(cls, path: Path) -> Self:
        """Open the file to append to it, without its unfinished last line if it has one.

        Raises ResultFileError.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            raise ResultFileError(f"{path} cannot be written: {error.strerror}") from error
        file = cls(path, fd)
        os.ftruncate(fd, file._content().rfind(b"\n") + 1)
        return file

    def append(self, values: Mapping[str, Any]) -> None:
        """Append one record, with its schema and kind.

        Raises TransferError if the line cannot be written completely; no part of it stays then.
        """
        data = (json.dumps(values, allow_nan=False) + "\n").encode("ascii")
        before = os.fstat(self._fd).st_size
        try:
            written = os.write(self._fd, data)
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError as error:
            os.ftruncate(self._fd, before)
            raise TransferError.wrap(error, "writing", self.path) from error

    @property
    def empty(self) -> bool:
        """Whether nothing was appended."""
        return os.fstat(self._fd).st_size == 0

    def count(self, kind: str) -> int:
        """Count the records of `kind` in the file.

        A counter in memory would miss a record if an interrupt follows its write.
        """
        return sum(json.loads(line)["kind"] == kind for line in self._content().splitlines())

    def close(self) -> None:
        """Sync and close. A second call has no effect."""
        if self._fd < 0:
            return
        try:
            os.fsync(self._fd)
        finally:
            os.close(self._fd)
            self._fd = -1

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def _content(self) -> bytes:
        return os.pread(self._fd, os.fstat(self._fd).st_size, 0)


def records(
    path: Path,
    schema: str,
    kinds: Mapping[str, type],
    *,
    escaped: bool = True,
    growing: bool = False,
) -> Iterator[tuple[int, Any]]:
    """Yield the number of each line and its record, one of `kinds`. Empty lines are left out.

    With `escaped`, texts have no control characters: other people's text may command a terminal.
    With `growing`, an unfinished last line is left out. Raises ResultFileError, which names file,
    line and remedy, if the file is missing, of another or a newer schema, or damaged.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE_BYTES), b""), 1):
                if line.strip() and not (growing and not line.endswith(b"\n")):
                    values = _parse(path, number, line, escaped=escaped)
                    _check_schema(path, number, values, schema)
                    try:
                        record = from_record(values, kinds)
                    except (ValueError, OverflowError) as error:
                        raise line_error(path, number, str(error)) from error
                    yield number, record
    except FileNotFoundError as error:
        raise ResultFileError(
            f"{path}: no such file; iobench writes its records under results/"
        ) from error
    except IsADirectoryError as error:
        raise ResultFileError(f"{path} is a directory; give a result file (.jsonl)") from error
    except OSError as error:
        raise ResultFileError(f"{path} cannot be read: {error.strerror}") from error


def family_of(path: Path) -> str:
    """Return the schema of the file's first line without its version; empty if it has none."""
    try:
        with path.open("rb") as file:
            begin = file.readline(_SCHEMA_BYTES).decode("ascii", "replace")
    except OSError:  # the reader reports it
        return ""
    found = _SCHEMA.match(begin)
    return found[1] if found else ""


def line_error(path: Path, number: int, problem: str) -> ResultFileError:
    """Return the error of one line."""
    return ResultFileError(f"{path}, line {number}: {problem}")


def ending(error: BaseException | None) -> tuple[EndStatus, str | None]:
    """Return the status and the text, on one line, of a `with` block that ended by `error`."""
    if error is None:
        return "complete", None
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", None
    return "failed", one_line(error)


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
    """Raise ResultFileError if `path` exists or could not be created. Creates nothing itself."""
    wanted = Path(path).absolute()
    if os.path.lexists(wanted):
        raise _exists(path)
    above = next(one for one in wanted.parents if os.path.lexists(one))
    if not above.is_dir():
        raise ResultFileError(f"{path} cannot be created: {above} is not a directory")
    if not os.access(above, os.W_OK | os.X_OK, effective_ids=True):
        raise ResultFileError(f"{path} cannot be created: {above} is not writable")


def _exists(path: str | os.PathLike[str]) -> ResultFileError:
    return ResultFileError(f"{path} exists and is not overwritten; choose another name")


def _parse(path: Path, number: int, line: bytes, *, escaped: bool) -> Any:
    try:
        text = line.decode().strip()
        values = _JSON.decode(text)
        if escaped and ("\\" in text or not text.isprintable()):
            values = printable_values(values)
    except (ValueError, RecursionError) as error:
        if number == 1:
            problem = "not JSON; give a .jsonl file that iobench wrote"
        elif line.endswith(b"\n"):
            problem = "damaged, not JSON; take another copy of the file"
        else:
            problem = (
                "cut short, as when a run is killed; to read the lines before it: "
                f"sed -i '$d' {path}"
            )
        raise line_error(path, number, problem) from error
    return values


def _check_schema(path: Path, number: int, values: Any, wanted: str) -> None:
    found = values.get("schema") if isinstance(values, dict) else None
    family, _, version = found.partition("/") if isinstance(found, str) else ("", "", "")
    own, _, newest = wanted.partition("/")
    if family in _FILES and family != own:
        what, remedy = _FILES[family]
        raise ResultFileError(f"{path} is {what}, not {_FILES[own][0]}; {remedy.format(path=path)}")
    if family != own or not version.isdecimal():
        raise line_error(path, number, f"not a record of {_FILES[own][0]}")
    if int(version) > int(newest):
        raise line_error(
            path,
            number,
            f"written by a newer iobench (schema {found}); upgrade iobench to read it",
        )


def _finite(text: str) -> float:
    """Parse a number; reject JSON's NaN and Infinity, and numbers beyond a double."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not finite")
    return number


def _whole(text: str) -> int:
    if len(text) > 19:
        raise ValueError(f"{text:.30} is too large")
    return int(text)


# Not msgspec, which refuses the names of files that are not UTF-8.
_JSON = json.JSONDecoder(parse_constant=_finite, parse_float=_finite, parse_int=_whole)
