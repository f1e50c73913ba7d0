"""BothTiers: reads one checkpoint from the local tier, and from the remote one at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from iobench import linux
from iobench.checkpoint.compared import ComparedImage
from iobench.checkpoint.store import CheckpointStore
from iobench.errors import DataMismatchError, IobenchError, TransferError
from iobench.tiers.ranges import FileRange, SharedRanges, next_size
from iobench.units import GIB, MIB, format_size
from iobench.writers.availability import Availability
from iobench.writers.base import Writer
from iobench.writers.blocks.pages import fresh_pages
from iobench.writers.image import FileImage
from iobench.writers.source import Source
from iobench.writers.stream import Stream
from iobench.writers.transfer import Meter, Transfer

__all__ = ["BothTiers", "RemoteCheckpoint"]

_LEAST, _LEAST_RANGE = 256 * MIB, 128 * MIB
"""A smaller file, or range of a larger one, is read from one tier: the second one would begin when
the first one ends."""
_LEAST_LOCAL, _MOST_LOCAL = 64 * MIB, GIB
_LEAST_REMOTE, _MOST_REMOTE = 16 * MIB, 128 * MIB
_LEAST_GAIN, _LEAST_RANGE_GAIN = 10.0, 3.0
"""A remote tier that is so many times slower is not worth the traffic. At the end of each read,
what it has not delivered yet is lost, so a range must gain more than a whole file."""


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

    A large file is read from both tiers if that is faster, by the rates of the first ranges. A read
    never waits for the remote tier while the local one works. A piece that is damaged is read
    again from the other tier. If the local tier fails, the remote one reads the rest.
    """

    schemes = ("file", "s3")

    def __init__(self, local: Writer, remote: RemoteCheckpoint) -> None:
        self.name = local.name  # type: ignore[misc]  # of this one, not of the class
        self.options = local.options
        self._local, self._remote = local, remote
        self._verdict: bool | None = None
        self.local_rate: float | None = None
        self.remote_rate: float | None = None
        """Bytes per second of the last read of each tier; the next range of a file begins with
        them.
        """
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
        """Fill the image. Raises the error of the local tier if the remote one cannot help."""
        whole, part = (
            start == 0 and stop is None,
            (start, image.size_bytes if stop is None else stop),
        )
        least = _LEAST if whole else _LEAST_RANGE
        if part[1] - part[0] >= least and self._verdict is not False:
            found = _SharedRead(self, image, target, part).run()
        else:
            found = self._local.read(image, target, start=start, stop=stop)
        if isinstance(image, ComparedImage) and whole:
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

    def _fetch(self, image: FileImage, part: FileRange) -> None:
        memory = fresh_pages(image.size_bytes, huge=False)
        self.read_remote(FileImage.of(image.path, [memory]), part)
        image.scatter(*part, memory[part[0] : part[1]])
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

    def read_remote(self, image: FileImage, part: FileRange) -> Transfer:
        """Fill a range from the remote tier."""
        where = self._remote.store.locate(self._remote.step)
        return self._remote.writer.read(image, where, start=part[0], stop=part[1])

    def read_local(self, image: FileImage, target: str | Path, part: FileRange) -> Transfer:
        """Fill a range from the local tier."""
        return self._local.read(image, target, start=part[0], stop=part[1])

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


class _SharedRead:
    """A part of a file: the caller reads from the local tier, a thread from the remote one."""

    def __init__(
        self, tiers: BothTiers, image: FileImage, target: str | Path, part: FileRange
    ) -> None:
        self._tiers, self._image, self._target, self._part = tiers, image, target, part
        self._ranges = SharedRanges(*part)
        whole = part == (0, image.size_bytes)
        self._least_gain = _LEAST_GAIN if whole else _LEAST_RANGE_GAIN
        self._local_rate: float | None = None if whole else tiers.local_rate
        self._remote_rate: float | None = None if whole else tiers.remote_rate
        self._ended = threading.Event()
        self._local_failed = False
        self._from_remote: list[Transfer] = []

    def run(self) -> Transfer:
        began_s = time.perf_counter()
        thread = threading.Thread(target=self._help, name="iobench-remote-read", daemon=True)
        thread.start()
        again: list[FileRange] = []
        parts: list[Transfer] = []
        try:
            while (part := self._ranges.take_front(self._local_size())) is not None:
                try:
                    done = self._tiers.read_local(self._image, self._target, part)
                except (DataMismatchError, TransferError) as error:
                    self._ranges.give_back(part)
                    again.append(part)
                    self._finish_remotely(error)
                    break
                parts.append(done)
                self._local_rate = _rate(done)
        finally:
            self._ranges.close()
            self._tiers.local_rate, self._tiers.remote_rate = self._local_rate, self._remote_rate
        if again and isinstance(self._image, ComparedImage):
            self._image.damaged()
            for start, stop in again:
                self._image.compare_again(start, stop)
        total = Transfer.total([*self._from_remote, self._nothing(), *parts])
        size, elapsed_s = self._part[1] - self._part[0], time.perf_counter() - began_s
        return replace(total, files=1, bytes=size, elapsed_s=elapsed_s)

    def _nothing(self) -> Transfer:
        return Meter().transfer(self._tiers.name, "read", 0, durable=True, files=0)

    def _local_size(self) -> int:
        found = next_size(
            self._ranges.left, self._local_rate, self._remote_rate,
            least=_LEAST_LOCAL, most=_MOST_LOCAL,
        )  # fmt: skip
        return found or _LEAST_LOCAL

    def _remote_size(self) -> int:
        if self._local_failed:
            return _MOST_REMOTE
        own, other = self._remote_rate, self._local_rate
        if own is not None and other is not None and own * self._least_gain < other:
            return 0
        return next_size(self._ranges.left, own, other, least=_LEAST_REMOTE, most=_MOST_REMOTE)

    def _finish_remotely(self, error: IobenchError) -> None:
        """Wait until the remote tier has read the rest. Raises `error` if it cannot."""
        self._local_failed = True
        self._tiers.local_problem = str(error)
        self._ended.wait()
        if self._ranges.left:
            self._help()  # it had ended before
        if self._ranges.left:
            raise error

    def _help(self) -> None:
        """Read ranges from the remote tier, from the back of the file."""
        try:
            if self._tiers.remote_is_same():
                self._read_ranges()
        except (IobenchError, OSError) as error:  # OSError: no memory
            self._tiers.remote_problem = str(error)
        finally:
            self._ranges.withdraw()
            self._ended.set()

    def _read_ranges(self) -> None:
        # Address space for the whole file. Pages take memory when they are read.
        memory = fresh_pages(self._image.size_bytes, huge=False)
        private = FileImage.of(self._image.path, [memory])
        while (part := self._ranges.take_back(self._remote_size())) is not None:
            start, stop = part
            done = self._tiers.read_remote(private, part)
            self._from_remote.append(done)
            self._remote_rate = _rate(done)
            if not self._ranges.deliver(part, partial(self._fill, memory[start:stop], start, stop)):
                return
            linux.give_up_pages(memory.ctypes.data + start, stop - start)

    def _fill(self, block: Any, start: int, stop: int) -> None:
        self._image.scatter(start, stop, block)
        self._image.filled(start, stop)
        self._tiers.remote_bytes += stop - start


def _rate(done: Transfer) -> float:
    return done.bytes / max(done.elapsed_s, 1e-9)
