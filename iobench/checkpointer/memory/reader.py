"""MemoryCandidates: a checkpoint of which each rank reads its own file from memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from iobench.checkpoint.load.candidates import Candidates, WrappedCandidates
from iobench.checkpoint.manifest import Manifest
from iobench.remote.memory_reader import MemoryReader
from iobench.remote.memory_slot import MemorySlot
from iobench.units import format_size
from iobench.writers.copy_reader import CopyReader
from iobench.writers.image import FileImage
from iobench.writers.source import Source
from iobench.writers.transfer import Transfer

__all__ = ["MemoryCandidates"]


class MemoryCandidates(WrappedCandidates):
    """`inner`, with the copy of `step` in memory, in which each rank has its own file.

    `slot` has that of this rank, until it is known to be damaged. The next copy of `step` is that
    of `inner`.
    """

    def __init__(self, inner: Candidates, step: int, slot: MemorySlot) -> None:
        super().__init__(inner)
        assert slot.kept is not None
        (self._file,) = slot.kept.files(slot.memory)
        self._step, self._slot, self._tier = step, slot, slot.tiers
        self._problem = ""  # why the copy in memory is left
        self._reader: _MemoryFirst | None = None

    def reader(self, step: int, manifest: Manifest) -> CopyReader:
        stored = super().reader(step, manifest)
        if step != self._step or self._problem:
            return stored
        self._reader = _MemoryFirst(self._file, stored, self._damaged)
        return self._reader

    def next_copy(self, step: int, problem: str) -> bool:
        if step != self._step or self._problem:
            return super().next_copy(step, problem)
        self._problem = problem
        self._damaged()
        return True

    def _damaged(self) -> None:
        self._slot.kept = None

    def sources(self, step: int) -> dict[str, str]:
        read = self._reader
        if step != self._step or read is None:
            return super().sources(step)
        problem = self._problem or read.problem
        if not problem:
            return {self._tier: "read"}
        warnings.warn(
            f"the file of this rank is not read from {self._tier} alone: {problem}",
            RuntimeWarning,
            stacklevel=3,
        )
        if self._problem:
            return {self._tier: problem, **(super().sources(step) or {str(self): "read"})}
        again = f"read {format_size(read.stored_bytes)}"
        return {self._tier: f"read in part; {problem}", str(self): again}


class _MemoryFirst:
    """The copy of one file in memory; other files and damaged ranges are those of `stored`."""

    def __init__(self, file: FileImage, stored: CopyReader, damaged: Callable[[], None]) -> None:
        self._file, self._memory = file.path, MemoryReader([file], stored.location)
        self._stored, self._damaged = stored, damaged
        self._again: set[tuple[int, int]] = set()
        self.name, self.direct, self.location = stored.name, stored.direct, stored.location
        self.problem, self.stored_bytes = "", 0

    def read(self, image: FileImage, start: int = 0, stop: int | None = None) -> Transfer:
        copy = self._memory if image.path == self._file else self._stored
        return copy.read(image, start, stop)

    def read_again(self, image: FileImage, start: int, stop: int, piece: str) -> bool:
        if (start, stop) in self._again:
            return self._stored.read_again(image, start, stop, piece)
        self._again.add((start, stop))
        self.problem = self.problem or f"{image.path} is damaged"
        self.stored_bytes += stop - start
        self._damaged()
        self._stored.read(image, start, stop)
        return True

    def open_source(self, target: str) -> Source:
        return self._stored.open_source(target)
