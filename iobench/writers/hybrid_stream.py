"""HybridStream: a stream whose blocks, and the rest of one, take the path that suits each."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from iobench import linux
from iobench.writers.crew import Crew, ThreadCrew
from iobench.writers.direct_engine import DirectEngine
from iobench.writers.direct_stream import DirectStream
from iobench.writers.files import NewFile
from iobench.writers.flight import OnComplete
from iobench.writers.hybrid_file import HybridFile
from iobench.writers.image import Bytes, FileImage
from iobench.writers.ring_crew import RingCrew
from iobench.writers.transfer import Meter
from iobench.writers.workers import BlockPool

__all__ = ["HybridStream"]

_MakeEngine = Callable[[Meter], DirectEngine]


class _HybridCrew(ThreadCrew):
    """Each block takes the path that the policy gives it."""

    def __init__(
        self, fd: int, *, hybrid: HybridFile, pool: BlockPool, threads: int, engine: _MakeEngine
    ) -> None:
        super().__init__(fd, pool=pool, threads=threads, alignment=linux.PAGE)
        self._hybrid, self._engine = hybrid, engine

    def put(self, data: Bytes, offset: int, meter: Meter) -> None:
        block, own = FileImage.of("block", [data]), Meter()
        self._hybrid.write(block, 0, len(data), own, self._engine(own), at=offset, last=False)
        own.seconds.clear()  # the crew has a clock of its own
        meter.absorb([own])


class _HybridFlight:
    """Blocks that take the path that the policy gives them, by one ring and its thread."""

    def __init__(self, hybrid: HybridFile, engine: DirectEngine, meter: Meter) -> None:
        self._hybrid, self._engine, self._meter = hybrid, engine, meter

    def __len__(self) -> int:
        return len(self._engine)

    def start(self, data: Bytes, offset: int, wanted: int, on_complete: OnComplete) -> None:
        block = FileImage.of("block", [data])
        self._hybrid.write(
            block,
            0,
            wanted,
            self._meter,
            self._engine,
            at=offset,
            last=False,
            on_complete=on_complete,
        )

    def wait_one(self) -> None:
        self._engine.wait_one()

    def drain(self) -> None:
        self._engine.drain()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._engine.close(error)


class HybridStream(DirectStream):
    """Full blocks go to a crew, what is left at a flush or at the end goes as the policy says.

    `ring` makes the engine of the crew's one thread; without it there are `iodepth` threads.
    """

    def __init__(
        self,
        file: NewFile,
        writer: str,
        meter: Meter,
        *,
        hybrid: HybridFile,
        pool: BlockPool,
        iodepth: int,
        blocking: _MakeEngine,
        ring: _MakeEngine | None,
        reserve_ahead: bool,
    ) -> None:
        self._hybrid = hybrid
        self._engine = blocking(meter)
        crew: Crew
        if ring is None:
            crew = _HybridCrew(file.fd, hybrid=hybrid, pool=pool, threads=iodepth, engine=blocking)
        else:
            crew = RingCrew(
                file.fd,
                pool=pool,
                iodepth=iodepth,
                make_flight=lambda own: _HybridFlight(hybrid, ring(own), own),
            )
        super().__init__(
            file,
            writer,
            meter,
            crew=crew,
            pool=pool,
            alignment=linux.PAGE,
            reserve_ahead=reserve_ahead,
        )

    def _drain(self) -> int:
        with self._meter.phase("wait"):
            self._crew.settle()
        if self._filled:
            rest = FileImage.of("rest", [self._block[: self._filled]])
            self._hybrid.write(
                rest, 0, self._filled, self._meter, self._engine, at=self._offset, last=True
            )
        return self._position

    def _release(self) -> None:
        try:
            super()._release()
        finally:
            self._hybrid.close()
