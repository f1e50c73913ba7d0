"""DirectEngine: what carries ranges of one file past the page cache, for one thread."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from iobench.writers.direct_file import DirectFile, as_it_lies, round_up
from iobench.writers.direct_io import pread_direct, pwrite_direct
from iobench.writers.flight import Landed
from iobench.writers.image import FileImage
from iobench.writers.transfer import Meter
from iobench.writers.workers import BlockPool

__all__ = ["BlockingEngine", "DirectEngine", "Landing", "nothing"]


def nothing(_whole: bool) -> None:
    """For who need not know when a range has landed."""


class Landing:
    """Calls `landed` once all of `parts` have ended: True when every one of them is whole."""

    __slots__ = ("_landed", "_left", "_whole")

    def __init__(self, parts: int, landed: Landed) -> None:
        self._left, self._whole, self._landed = parts, True, landed

    def end(self, whole: bool) -> None:
        """One part has ended."""
        self._end(1, whole)

    def give_up(self, parts: int) -> None:
        """So many parts will never begin."""
        self._end(parts, whole=not parts)

    def _end(self, parts: int, whole: bool) -> None:
        if not parts:
            return
        self._left -= parts
        self._whole &= whole
        if not self._left:
            self._landed(self._whole)


class DirectEngine(ABC):
    """Moves ranges between an image and one file, always the same. Used by one thread.

    Ranges begin at multiples of the file's alignment. `landed` is called once for each of them,
    when the kernel has let go of its memory, also when `write` or `read` raises: True when all of
    it has been moved. What is still in flight at the end of a `with` is awaited, so that nobody
    frees what the kernel uses.
    """

    @abstractmethod
    def write(
        self,
        file: DirectFile,
        image: FileImage,
        start: int,
        stop: int,
        *,
        at: int,
        landed: Landed = nothing,
    ) -> None:
        """Write bytes [start, stop) of `image` at `at`; what is padded lies beyond. Raises OSError,
        perhaps that of an earlier range."""

    @abstractmethod
    def read(
        self,
        file: DirectFile,
        image: FileImage,
        begin: int,
        wanted: int,
        stop: int,
        *,
        landed: Landed = nothing,
    ) -> None:
        """Fill bytes [wanted, stop) of `image`; aligned `begin` is not above. Raises OSError,
        DataMismatchError, perhaps those of an earlier range."""

    @abstractmethod
    def __len__(self) -> int:
        """How many operations are in flight."""

    @property
    @abstractmethod
    def bytes_in_flight(self) -> int:
        """How many bytes they move."""

    @abstractmethod
    def land(self) -> None:
        """Wait until one operation has ended. Raises what it failed with."""

    def settle(self) -> None:
        """Wait until nothing is in flight, then raise the first failure."""
        failure: Exception | None = None
        while len(self):
            try:
                self.land()
            except Exception as error:  # noqa: BLE001 -- raised below
                failure = failure or error
        if failure:
            raise failure

    @abstractmethod
    def close(self, failure: BaseException | None = None) -> None:
        """Await what is in flight and end; `failure` is why."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(error)


class BlockingEngine(DirectEngine):
    """pwrite and preadv in the calling thread; `pool` has blocks as large as the ranges."""

    def __init__(self, pool: BlockPool, meter: Meter, *, path: str) -> None:
        self._pool, self._meter, self._path = pool, meter, path

    def write(
        self,
        file: DirectFile,
        image: FileImage,
        start: int,
        stop: int,
        *,
        at: int,
        landed: Landed = nothing,
    ) -> None:
        whole, unit = False, file.alignment.offset
        try:
            with contextlib.ExitStack() as held:
                data = as_it_lies(image, start, stop, file.alignment)
                if data is None:
                    block = held.enter_context(self._pool.block())
                    with self._meter.phase("gather"):
                        image.gather(start, stop, block)
                    data = block[: round_up(stop - start, unit)]
                with self._meter.phase("write"):
                    calls = pwrite_direct(file.fd, data, at, unit)
            self._meter.count(self._path, len(data), calls)
            whole = True
        finally:
            landed(whole)

    def read(
        self,
        file: DirectFile,
        image: FileImage,
        begin: int,
        wanted: int,
        stop: int,
        *,
        landed: Landed = nothing,
    ) -> None:
        whole, unit = False, file.alignment.offset
        try:
            data = as_it_lies(image, wanted, stop, file.alignment) if wanted == begin else None
            if data is not None:
                with self._meter.phase("read"):
                    calls = pread_direct(file.fd, data, begin, stop - begin, unit)
            else:
                with self._pool.block() as room:
                    block = room[: round_up(stop - begin, unit)]
                    with self._meter.phase("read"):
                        calls = pread_direct(file.fd, block, begin, stop - begin, unit)
                    with self._meter.phase("scatter"):
                        image.scatter(wanted, stop, block[wanted - begin :])
            self._meter.count(self._path, stop - begin, calls)
            whole = True
        finally:
            landed(whole)

    def __len__(self) -> int:
        return 0

    @property
    def bytes_in_flight(self) -> int:
        return 0

    def land(self) -> None:
        raise AssertionError("nothing is ever in flight")

    def close(self, failure: BaseException | None = None) -> None:
        pass
