"""HybridStream: the stream of the `hybrid` writer. Each block takes the path that suits it."""

from __future__ import annotations

from iobench import linux
from iobench.writers.direct.background import BackgroundWriter
from iobench.writers.direct.engine import DirectEngine
from iobench.writers.direct.stream import DirectStream
from iobench.writers.hybrid_paths.file import HybridFile
from iobench.writers.image import Extent
from iobench.writers.local.new_file import NewFile
from iobench.writers.transfer import Meter

__all__ = ["HybridStream"]


class HybridStream(DirectStream):
    """Background threads write full blocks; `engine` writes the rest, at a flush or at the end."""

    def __init__(
        self,
        file: NewFile,
        writer: str,
        meter: Meter,
        *,
        hybrid: HybridFile,
        engine: DirectEngine,
        background: BackgroundWriter,
        reserve_ahead: bool,
    ) -> None:
        self._hybrid, self._engine = hybrid, engine
        super().__init__(
            file,
            writer,
            meter,
            background=background,
            alignment=linux.PAGE,
            reserve_ahead=reserve_ahead,
        )

    def _drain(self) -> int:
        with self._meter.phase("write"):
            self._background.drain()
        if self._filled:
            rest = Extent.of(self._block[: self._filled], self._offset)
            self._hybrid.write(rest, self._engine, last=True)
        return self._position

    def _release(self) -> None:
        try:
            super()._release()
        finally:
            self._afterwards(self._hybrid.close)
