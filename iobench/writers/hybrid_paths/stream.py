"""HybridStream: the stream of the `hybrid` writer. Each block takes the path that suits it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from iobench import linux
from iobench.writers.blocks.workers import BlockPool
from iobench.writers.direct.background import BackgroundWriter
from iobench.writers.direct.engine import DirectEngine
from iobench.writers.direct.in_flight import OnComplete
from iobench.writers.direct.stream import DirectStream
from iobench.writers.hybrid_paths.file import HybridFile
from iobench.writers.image import Bytes, FileImage
from iobench.writers.local.new_file import NewFile
from iobench.writers.transfer import Meter

__all__ = ["HybridStream"]

_MakeEngine = Callable[[Meter], DirectEngine]


class _HybridBlocks:
    """The blocks in flight of one thread; each takes the path that the policy chooses."""

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        self._engine.close(error)


class HybridStream(DirectStream):
    """Background threads write full blocks. The caller writes the rest at a flush or at the end.

    `ring` makes the engine of a single background thread. Without `ring` there are `iodepth`
    threads, whose engines `blocking` makes.
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
        engine = ring or blocking
        background = BackgroundWriter(
            pool=pool,
            threads=1 if ring else iodepth,
            in_flight=iodepth if ring else iodepth + 1,
            begin=lambda own: _HybridBlocks(hybrid, engine(own), own),
            ring=ring is not None,
        )
        super().__init__(
            file,
            writer,
            meter,
            background=background,
            pool=pool,
            alignment=linux.PAGE,
            reserve_ahead=reserve_ahead,
        )

    def _drain(self) -> int:
        with self._meter.phase("wait"):
            self._background.drain()
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
            self._afterwards(self._hybrid.close)
