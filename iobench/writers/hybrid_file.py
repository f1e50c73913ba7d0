"""HybridFile: one open file with a way through the page cache and a way past it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from iobench import linux
from iobench.errors import IobenchError, TransferError, UnavailableError
from iobench.writers.cached_file import CachedFile
from iobench.writers.direct_engine import DirectEngine, Landing
from iobench.writers.direct_file import REFUSED, DirectFile, as_it_lies, direct_alignment
from iobench.writers.flight import Landed
from iobench.writers.image import FileImage
from iobench.writers.memory_pressure import MemoryPressure
from iobench.writers.path_policy import Operation, Path, PathPolicy, Position
from iobench.writers.transfer import Meter

__all__ = ["HybridFile"]

_Written = Callable[[], None]


def _nothing() -> None:
    pass


class _RefusedError(Exception):
    """The file system will not have a path; the message says why."""


class HybridFile:
    """Moves ranges of a file, each by the path that the policy gives it. Thread-safe.

    Ranges that are moved at the same time must not share a page. Then no page is ever touched by a
    cached and a direct operation at once: ranges are cut at page boundaries, and a direct
    write over pages that were written through the cache before waits until they are on storage and
    drops them first.

    `fd` is the way through the page cache and stays the caller's; it is opened once more for the
    way past it, when the first operation wants that. What goes past it is carried by the engine of
    the calling thread, at once or later. A path that is refused is given up for the whole
    file and recorded as a fallback; until one direct operation has succeeded each is awaited, so
    that a refusal is known before anything follows it.
    """

    def __init__(
        self,
        fd: int,
        name: str,
        *,
        writing: bool,
        policy: PathPolicy,
        pressure: MemoryPressure,
        block_size: int,
        small_size: int,
    ) -> None:
        self._cached, self._name = CachedFile(fd), name
        self._again = f"/proc/self/fd/{fd}"  # the same file, whatever happens to its name
        self._direct_flags = os.O_WRONLY if writing else os.O_RDONLY
        self._policy, self._pressure = policy, pressure
        self._block_size, self._small_size = block_size, small_size
        self._lock = threading.Lock()
        self._direct: DirectFile | None = None
        self._alignment = linux.DioAlignment(memory=linux.PAGE, offset=linux.PAGE)
        self._proved = False
        """Whether a direct operation has succeeded."""
        self._looked = False

    def may_go_direct(self) -> bool:
        """Whether the way past the page cache by O_DIRECT has not been given up."""
        return self._policy.has(Path.DIRECT)

    # Writing.

    def write(
        self,
        image: FileImage,
        start: int,
        stop: int,
        meter: Meter,
        engine: DirectEngine,
        *,
        at: int,
        last: bool,
        written: _Written = _nothing,
    ) -> None:
        """Write bytes [start, stop) of `image` at offset `at` of the file, a multiple of pages.

        `last` says that the file ends there for now. `written` is called once all is written: on
        return, or when `engine` lands or settles; never when that fails.
        """
        cuts = list(self._cut(start, stop, at, last=last))
        landing = Landing(len(cuts), lambda _whole: written())
        for begin, end, position in cuts:
            self._write(image, begin, end, position, meter, engine, at + begin - start, landing)

    def _write(
        self,
        image: FileImage,
        start: int,
        stop: int,
        position: Position,
        meter: Meter,
        engine: DirectEngine,
        offset: int,
        landing: Landing,
    ) -> Path:
        operation = Operation(
            size_bytes=stop - start,
            position=position,
            aligned=self._is_aligned(offset, stop - start),
            memory_aligned=as_it_lies(image, start, stop, self._alignment) is not None,
        )

        def direct(file: DirectFile, landed: Landed) -> None:
            if not self._is_aligned(offset, stop - start):  # known since the file was opened
                raise _RefusedError(f"direct I/O wants multiples of {file.alignment.offset} bytes")
            self._cached.leave(offset, offset + stop - start)
            engine.write(file, image, start, stop, at=offset, landed=landed)

        def cached(path: Path) -> None:
            self._cached.write(path, image, start, stop, offset, meter)

        path = self._carry_out(operation, meter, engine, direct, cached, landing)
        if path == Path.DIRECT and not self._looked:
            self._look(offset, stop - start, meter)
        return path

    def _cut(
        self, start: int, stop: int, at: int, *, last: bool
    ) -> Iterator[tuple[int, int, Position]]:
        """The operations of one write: all of it, or whole pages and the rest of the last page."""
        position = Position.MIDDLE if at else Position.FIRST
        if last:
            position = Position.TAIL if at else Position.WHOLE
        rest = (stop - start) % max(linux.PAGE, self._alignment.offset)
        if not rest or stop - start < self._small_size:
            yield start, stop, position
        else:
            yield start, stop - rest, Position.MIDDLE if at else Position.FIRST
            yield stop - rest, stop, Position.TAIL

    def _look(self, offset: int, length: int, meter: Meter) -> None:
        """Give O_DIRECT up where it is accepted and goes through the page cache all the same."""
        self._looked = True
        if self._cached.resident_bytes(offset, length) and self._policy.drop(Path.DIRECT):
            why = "O_DIRECT is accepted, yet goes through the page cache"
            meter.fell_back(Path.DIRECT, "page cache", why)

    # Reading.

    def read(
        self,
        image: FileImage,
        begin: int,
        wanted: int,
        stop: int,
        meter: Meter,
        engine: DirectEngine,
    ) -> None:
        """Fill bytes [wanted, stop) of `image`; `begin`, a multiple of pages, is not above.

        All is there on return, or when `engine` has settled.
        """
        data = as_it_lies(image, wanted, stop, self._alignment) if wanted == begin else None
        whole = begin == 0 and stop == image.size_bytes
        operation = Operation(
            size_bytes=stop - wanted,
            position=Position.WHOLE if whole else Position.FIRST if not begin else Position.MIDDLE,
            aligned=begin % self._alignment.offset == 0,  # a block is rounded up, and cut
            memory_aligned=data is not None,
            in_cache=self._cached.holds(wanted, stop),
        )

        def direct(file: DirectFile, landed: Landed) -> None:
            engine.read(file, image, begin, wanted, stop, landed=landed)

        def cached(path: Path) -> None:
            self._cached.read(path, image, wanted, stop, meter)

        self._carry_out(operation, meter, engine, direct, cached)

    # Both.

    def _carry_out(
        self,
        operation: Operation,
        meter: Meter,
        engine: DirectEngine,
        direct: Callable[[DirectFile, Landed], None],
        cached: Callable[[Path], None],
        landing: Landing | None = None,
    ) -> Path:
        """Move by the path that the policy chooses; after a refusal, recorded, by the next one.

        Returns the path that was taken. `landing` is told when all has been moved.
        """
        refused: list[tuple[Path, str]] = []

        def moved(path: Path, seconds: float) -> None:
            self._policy.learn(path, operation.size_bytes, seconds)
            if landing:
                landing.end(True)

        while True:
            decision = self._policy.choose(operation, self._pressure.now())
            try:
                if decision.path == Path.DIRECT:
                    self._go_direct(operation.size_bytes, engine, direct, moved)
                else:
                    self._go_cached(decision.path, engine, cached, moved)
            except _RefusedError as error:
                refused.append((decision.path, str(error)))
                if not self._policy.drop(decision.path):
                    raise TransferError(
                        f"{self._name}: {error}, and no other path is left"
                    ) from error
                continue
            break
        meter.decided(decision.path, decision.reason)
        for path, why in refused:
            meter.fell_back(path, decision.path, why)
        return decision.path

    def _go_cached(
        self,
        path: Path,
        engine: DirectEngine,
        cached: Callable[[Path], None],
        moved: Callable[[Path, float], None],
    ) -> None:
        if path == Path.UNCACHED:
            engine.settle()  # what is in flight must not count as this path's time
        began = time.perf_counter()
        cached(path)
        moved(path, time.perf_counter() - began)

    def _go_direct(
        self,
        size_bytes: int,
        engine: DirectEngine,
        direct: Callable[[DirectFile, Landed], None],
        moved: Callable[[Path, float], None],
    ) -> None:
        file = self._open_direct()
        # Little's law: what shares the device with others takes its share of the time.
        share = size_bytes / (size_bytes + engine.bytes_in_flight)
        began = time.perf_counter()

        def landed(whole: bool) -> None:
            if whole:
                moved(Path.DIRECT, (time.perf_counter() - began) * share)

        if self._proved:
            direct(file, landed)
            return
        outcome: list[bool] = []
        with _refusals("direct I/O"):
            try:
                direct(file, outcome.append)
            finally:
                engine.settle()
        self._proved = True
        landed(all(outcome))

    def _is_aligned(self, offset: int, length: int) -> bool:
        return not (offset | length) % self._alignment.offset

    def _open_direct(self) -> DirectFile:
        with self._lock:
            if self._direct is None:
                self._direct = self._opened_direct()
                self._alignment = self._direct.alignment
            return self._direct

    def _opened_direct(self) -> DirectFile:
        with _refusals("opening with O_DIRECT"):
            fd = os.open(self._again, self._direct_flags | os.O_DIRECT | os.O_CLOEXEC)
        try:
            return DirectFile(fd=fd, alignment=direct_alignment("direct", fd, self._block_size))
        except UnavailableError as error:
            os.close(fd)
            raise _RefusedError(error.reason.rstrip(".")) from error
        except BaseException:
            os.close(fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the way past the page cache, if it was opened."""
        with self._lock:
            file, self._direct = self._direct, None
        if file is not None:
            os.close(file.fd)


@contextlib.contextmanager
def _refusals(doing: str) -> Iterator[None]:
    """What the kernel says to a path that it will not have, as _RefusedError."""
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSED or isinstance(error, IobenchError):
            raise
        raise _RefusedError(f"{doing} is refused ({error.strerror})") from error
