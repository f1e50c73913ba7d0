"""BothTiers: reads one checkpoint from the local tier, and damaged pieces from the remote one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from iobench.checkpoint.compared import ComparedImage
from iobench.checkpoint.store import CheckpointStore
from iobench.errors import DataMismatchError, IobenchError, TransferError
from iobench.units import format_size
from iobench.writers.availability import Availability
from iobench.writers.base import Writer
from iobench.writers.image import FileImage
from iobench.writers.source import Source
from iobench.writers.stream import Stream
from iobench.writers.transfer import Transfer

__all__ = ["BothTiers", "RemoteCheckpoint"]

_Range = tuple[int, int]
"""Bytes [start, stop) of a file."""


@dataclass(frozen=True, kw_only=True)
class RemoteCheckpoint:
    """The copy of a checkpoint in the remote tier. `is_same` asks whether it is of the same save.

    It may wait for the remote tier for as long as the remote tier takes.
    """

    store: CheckpointStore
    writer: Writer
    step: int
    is_same: Callable[[], bool]


class BothTiers(Writer):
    """The read side of `local`, a writer, for a checkpoint that the remote tier may have too.

    A piece that is damaged is read again from the remote tier, which is asked for it only then.
    """

    schemes = ("file", "s3")

    def __init__(self, local: Writer, remote: RemoteCheckpoint) -> None:
        self.name = local.name  # type: ignore[misc]  # of this one, not of the class
        self.options = local.options
        self._local, self._remote = local, remote
        self._verdict: bool | None = None
        self.remote_bytes = 0
        """Bytes that came from the remote tier."""
        self.local_problem = self.remote_problem = ""
        """What was wrong with a tier or with its pieces."""

    @property
    def direct(self) -> bool:
        return self._local.direct

    def read(
        self, image: FileImage, target: str | Path, *, start: int = 0, stop: int | None = None
    ) -> Transfer:
        """Fill the image. Raises the error of the local tier if it cannot be read."""
        found = self._local.read(image, target, start=start, stop=stop)
        if isinstance(image, ComparedImage) and start == 0 and stop is None:
            self._mend(image, target)
        return found

    def _mend(self, image: ComparedImage, target: str | Path) -> None:
        """Read the damaged pieces again, from the remote tier, else from the local one."""
        damaged = image.damaged()
        if not damaged or not self.remote_is_same():
            return  # `compared` raises
        names = image.comparison.wrong
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        problem = f"{image.path} is damaged, {len(names)} checksums differ: {shown}"
        for part in damaged:
            try:
                self._fetch(image, part)
            except (DataMismatchError, TransferError) as error:
                self.remote_problem = str(error)
            image.compare_again(*part)
            if part not in image.damaged():
                self.local_problem = self.local_problem or problem
                continue
            self.remote_problem = self.remote_problem or problem
            self._local.read(image, target, start=part[0], stop=part[1])
            image.compare_again(*part)

    def _fetch(self, image: FileImage, part: _Range) -> None:
        where = self._remote.store.locate(self._remote.step)
        plain = FileImage(path=image.path, segments=image.segments)  # it compares nothing
        self._remote.writer.read(plain, where, start=part[0], stop=part[1])
        self.remote_bytes += part[1] - part[0]

    def read_again(self, image: FileImage, start: int, stop: int) -> bool:
        """Fill a damaged range from the remote tier; False: it has no copy, or it fails."""
        if not self.remote_is_same():
            return False
        self.local_problem = self.local_problem or f"{image.path} is damaged"
        try:
            self._fetch(image, (start, stop))
        except (DataMismatchError, TransferError) as error:
            self.remote_problem = str(error)
            return False
        return True

    def remote_is_same(self) -> bool:
        """Return whether the remote tier has this save. Waits for its answer, once."""
        if self._verdict is None:
            try:
                self._verdict = self._remote.is_same()
            except IobenchError as error:
                self._verdict, self.remote_problem = False, str(error)
        return self._verdict

    def sources(self, local: str, remote: str) -> dict[str, str]:
        """Return what came from which tier, after the reads."""
        if not self.remote_bytes:
            return {local: "read", **({remote: self.remote_problem} if self.remote_problem else {})}
        own, there = ["read in part"], [f"read {format_size(self.remote_bytes)}"]
        return {
            local: "; ".join(filter(None, [*own, self.local_problem])),
            remote: "; ".join(filter(None, [*there, self.remote_problem])),
        }

    def open_source(self, target: str | Path) -> Source:
        return self._local.open_source(target)

    def available(self, target: str | Path = ".") -> Availability:
        return self._local.available(target)

    def write(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("it only reads")

    def open(self, target: str | Path, size: int | None = None) -> Stream:
        del target, size
        raise AssertionError("it only reads")
