"""Candidates: the checkpoints that a restore chooses from, each with its copies."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.store import Checkpoints
from iobench.writers.base import Writer
from iobench.writers.copy_reader import CopyReader, StoredReader

__all__ = ["Candidates", "StoredCandidates", "WrappedCandidates"]


class Candidates(Checkpoints, Protocol):
    """The checkpoints of a run, for one restore.

    `manifest` and `locate` are those of the nearest copy of a step that `next_copy` has not left.
    """

    def reader(self, step: int, manifest: Manifest) -> CopyReader:
        """Return what reads this copy, which has this manifest; see CopyReader for the next one."""

    def next_copy(self, step: int, problem: str) -> bool:
        """Leave a copy that cannot be read for the next one. False: there is no other.

        In a job, a call of all ranks.
        """

    def sources(self, step: int) -> dict[str, str]:
        """Return what was read of each copy of a restored checkpoint, or why it was not.

        Empty where there is only one place. Warns (RuntimeWarning) of copies that were replaced.
        """


class _Wrapped:
    """The checkpoints `inner`."""

    def __init__(self, inner: Checkpoints) -> None:
        self._checkpoints, self.readers = inner, inner.readers

    def __str__(self) -> str:
        return str(self._checkpoints)

    def steps(self) -> list[int]:
        return self._checkpoints.steps()

    def serials(self) -> dict[int, int]:
        return self._checkpoints.serials()

    def manifest(self, step: int, *, files: bool = True) -> Manifest:
        return self._checkpoints.manifest(step, files=files)

    def locate(self, step: int) -> str | Path:
        return self._checkpoints.locate(step)


class StoredCandidates(_Wrapped):
    """The checkpoints of one store, which `writer` reads: one copy of each."""

    def __init__(self, store: Checkpoints, writer: Writer) -> None:
        super().__init__(store)
        self._writer = writer

    def reader(self, step: int, manifest: Manifest) -> CopyReader:
        del manifest
        return StoredReader(self._writer, self.locate(step))

    def next_copy(self, step: int, problem: str) -> bool:
        del step, problem
        return False

    def sources(self, step: int) -> dict[str, str]:
        del step
        return {}


class WrappedCandidates(_Wrapped):
    """The candidates `inner`. A subclass adds nearer copies of one of them."""

    def __init__(self, inner: Candidates) -> None:
        super().__init__(inner)
        self._inner = inner

    def reader(self, step: int, manifest: Manifest) -> CopyReader:
        return self._inner.reader(step, manifest)

    def next_copy(self, step: int, problem: str) -> bool:
        return self._inner.next_copy(step, problem)

    def sources(self, step: int) -> dict[str, str]:
        return self._inner.sources(step)
