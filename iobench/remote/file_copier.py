"""FileCopier: moves the files of one checkpoint to the remote tier, and reads them back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from iobench.checkpoint.manifest import FileRecord, PinnedGeneration
from iobench.checkpoint.store import DirectoryStore
from iobench.remote.pace import DrainPace
from iobench.remote.queue import Queued
from iobench.remote.read_back import compare_file, read_back
from iobench.remote.remote import RemoteTier
from iobench.remote.source_file import LocalDamageError, PinnedFiles, SourceFile
from iobench.writers.image import Bytes
from iobench.writers.source import LocalSource

__all__ = ["FileCopier"]


@dataclass(frozen=True, kw_only=True)
class FileCopier:
    """Moves files from `local` to `remote` at a pace, in this process.

    A job of several ranks has another one, which lets each rank move a share.
    """

    local: DirectoryStore
    remote: RemoteTier
    pace: DrainPace
    offload: Callable[[], PinnedFiles | None]
    """Returns the state that has the pinned generations of checkpoints."""

    def send(
        self,
        step: int,
        serial: int,
        place: str | Path,
        files: Sequence[FileRecord],
        pinned: Sequence[PinnedGeneration] = (),
    ) -> int:
        """Send files of a checkpoint to `place`, of RemoteTier.place; return the bytes sent.

        Also those of its `pinned` generations. What was there already is not sent. The files are
        durable on return. Raises LocalDamageError, TransferError, DrainStoppedError.
        """
        copy, sent = self.remote.copy(place, serial, self.pace), 0
        directory = self.local.locate(step)
        for file in files:
            with SourceFile(directory, file.path, file.size_bytes) as source:
                sent += copy.send(source)
        for one in pinned:
            for file in one.files:
                with self._opened(one, file) as source:
                    sent += copy.send(source)
        return sent

    def compare_local(
        self, step: int, files: Sequence[FileRecord], pinned: Sequence[PinnedGeneration] = ()
    ) -> None:
        """Compare the local files, and those of `pinned`. Raises DataMismatchError, OSError."""
        where = str(self.local.locate(step))
        read_back(files, where, LocalSource, self.pace.wait)
        for one in pinned:
            for file in one.files:
                with self._opened(one, file) as source:
                    compare_file(file, self._paced(source), os.path.join(one.directory, file.path))

    @contextmanager
    def _opened(self, pinned: PinnedGeneration, file: FileRecord) -> Iterator[SourceFile]:
        state = self.offload()
        if state is None:
            raise LocalDamageError(f"{pinned.directory}: the optimizer is not open")
        with state.open_file(pinned, file) as source:
            yield source

    def _paced(self, source: SourceFile) -> Iterator[Bytes]:
        for block in source.blocks():
            self.pace.wait(len(block))
            yield block

    def read_back(self, where: str | Path, files: Sequence[FileRecord]) -> None:
        """Compare `files` at `where` in the remote tier. Raises what `read_back` raises."""
        read_back(files, where, self.remote.writer.open_source, self.pace.wait)

    def tell(self, entries: Sequence[Queued]) -> None:
        """Let other ranks know the states of the copies; there are none."""

    def end(self) -> None:
        """The drain has ended."""
