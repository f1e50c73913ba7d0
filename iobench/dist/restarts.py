"""FailedRestarts: how often a job was restored from a step and did not get any further."""

from __future__ import annotations

import errno
import json
import warnings
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from iobench.errors import IobenchError, TransferError, transfer_errors
from iobench.text import parse_json
from iobench.writers.base import Writer
from iobench.writers.image import FileImage
from iobench.writers.local.new_file import sync_directory
from iobench.writers.s3_store.target import S3Target, is_s3

if TYPE_CHECKING:
    from iobench.writers.s3 import S3Writer

__all__ = ["FailedRestarts"]

_FILE = ".iobench-restarts.json"


class FailedRestarts:
    """Counts in a small file, or object, beside the checkpoints at `location`; used by rank 0.

    The first load of a step counts it; further loads by the same Checkpointer are no restarts. The
    next commit, and a good end of the job, remove the file. So the count of a step is the number of
    restarts from it that failed. None counts nothing: for the other ranks.
    """

    def __init__(self, location: str | Path | None, writer: Writer | None = None) -> None:
        self._file = None if location is None else _file_at(location, writer)
        self._own: set[int] = set()
        self._removed = False

    def counts(self) -> dict[int, int]:
        """Return the failed restarts by step, without this one.

        A file with other content counts nothing. One that cannot be read gives a RuntimeWarning and
        counts nothing: a job must not fail for it.
        """
        return {step: count - (step in self._own) for step, count in self._read().items()}

    def _read(self) -> dict[int, int]:
        if self._file is None:
            return {}
        try:
            found = parse_json(self._file.read() or b"{}")
            return {int(step): int(count) for step, count in found.items()}
        except (IobenchError, OSError) as error:
            _warn(f"{self._file} cannot be read ({error}): failed restarts are not counted")
            return {}
        except (ValueError, AttributeError, TypeError):
            return {}

    def loaded(self, step: int) -> None:
        """Count the first load of `step` by this Checkpointer. Raises TransferError."""
        if self._file is None or step in self._own:
            return
        counts = self._read()
        counts[step] = counts.get(step, 0) + 1
        self._removed = False
        self._file.write(json.dumps(counts).encode())
        self._own.add(step)

    def progressed(self) -> None:
        """Forget all counts: the job has saved something newer, or has ended well.

        A file that cannot be removed gives a RuntimeWarning: the save itself is committed.
        """
        self._own.clear()
        if self._file is None or self._removed:  # one request to a bucket, not one per save
            return
        try:
            self._file.remove()
            self._removed = True
        except (IobenchError, OSError) as error:
            _warn(
                f"{self._file} cannot be removed ({error}): the next restart may count as a failed "
                "one"
            )


class _File(Protocol):
    def read(self) -> bytes | None:
        """Return the content; None without a file. Raises OSError and IobenchError."""

    def write(self, data: bytes) -> None:
        """Replace the content in one step; durable on return. Raises TransferError."""

    def remove(self) -> None:
        """Remove the file. One that is not there is not an error."""


def _file_at(location: str | Path, writer: Writer | None) -> _File:
    if not is_s3(location):
        return _LocalFile(Path(location) / _FILE)
    return _Object(S3Target.parse(location), cast("S3Writer", writer))  # no other one opened it


class _LocalFile:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def read(self) -> bytes | None:
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return None

    def write(self, data: bytes) -> None:
        aside = self._path.with_name(f"{_FILE}.part")
        with transfer_errors("writing", self._path):
            aside.write_bytes(data)
            aside.replace(self._path)
            sync_directory(self._path.parent)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


class _Object:
    def __init__(self, place: S3Target, writer: S3Writer) -> None:
        self._place, self._writer = place, writer

    def __str__(self) -> str:
        return str(self._place.below(_FILE))

    def read(self) -> bytes | None:
        try:
            with closing(self._writer.open_source(str(self))) as source:
                return source.read(-1)
        except TransferError as error:
            if error.errno == errno.ENOENT:
                return None
            raise

    def write(self, data: bytes) -> None:
        self._writer.write(FileImage.of(_FILE, [data]), str(self._place))

    def remove(self) -> None:
        from iobench.writers.s3_store.objects import S3Objects

        S3Objects(self._writer.client, self._place).delete([self._place.below(_FILE).key])


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=4)
