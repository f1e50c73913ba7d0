"""HybridStream: a stream whose blocks, and the rest of one, take the path that suits each."""

from __future__ import annotations

from iobench import linux
from iobench.writers.crew import ThreadCrew
from iobench.writers.direct_stream import DirectStream
from iobench.writers.files import NewFile
from iobench.writers.hybrid_file import HybridFile
from iobench.writers.image import Bytes, FileImage
from iobench.writers.transfer import Meter
from iobench.writers.workers import BlockPool

__all__ = ["HybridStream"]


class _HybridCrew(ThreadCrew):
    """Each block takes the path that the policy gives it."""

    def __init__(self, fd: int, *, hybrid: HybridFile, pool: BlockPool, threads: int) -> None:
        super().__init__(fd, pool=pool, threads=threads, alignment=linux.PAGE)
        self._hybrid = hybrid

    def put(self, data: Bytes, offset: int, meter: Meter) -> None:
        block, own = FileImage.of("block", [data]), Meter()
        self._hybrid.write(block, 0, len(data), own, at=offset, last=False)
        own.seconds.clear()  # the crew has a clock of its own
        meter.absorb([own])


class HybridStream(DirectStream):
    """Full blocks go to a crew, what is left at a flush or at the end goes as the policy says."""

    def __init__(
        self,
        file: NewFile,
        writer: str,
        meter: Meter,
        *,
        hybrid: HybridFile,
        pool: BlockPool,
        threads: int,
        reserve_ahead: bool,
    ) -> None:
        self._hybrid = hybrid
        super().__init__(
            file,
            writer,
            meter,
            crew=_HybridCrew(file.fd, hybrid=hybrid, pool=pool, threads=threads),
            pool=pool,
            alignment=linux.PAGE,
            reserve_ahead=reserve_ahead,
        )

    def _drain(self) -> int:
        with self._meter.phase("wait"):
            self._crew.settle()
        if self._filled:
            rest = FileImage.of("rest", [self._block[: self._filled]])
            self._hybrid.write(rest, 0, self._filled, self._meter, at=self._offset, last=True)
        return self._position

    def _release(self) -> None:
        try:
            super()._release()
        finally:
            self._hybrid.close()
