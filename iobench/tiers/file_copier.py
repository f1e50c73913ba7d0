"""FileCopier: moves the files of one checkpoint to the remote tier, and reads them back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from iobench.checkpoint.manifest import FileRecord
from iobench.checkpoint.store import DirectoryStore
from iobench.tiers.pace import DrainPace
from iobench.tiers.queue import Queued
from iobench.tiers.read_back import read_back
from iobench.tiers.remote import RemoteTier
from iobench.tiers.source_file import SourceFile

__all__ = ["FileCopier"]


@dataclass(frozen=True, kw_only=True)
class FileCopier:
    """Moves files from `local` to `remote` at a pace, in this process.

    A job of several ranks has another one, which lets each rank move a share.
    """

    local: DirectoryStore
    remote: RemoteTier
    pace: DrainPace

    def send(self, step: int, serial: int, place: str | Path, files: Sequence[FileRecord]) -> int:
        """Send files of a checkpoint to `place`, of RemoteTier.place; return the bytes sent.

        What was there already is not sent. The files are durable on return. Raises
        LocalDamageError, TransferError, DrainStoppedError.
        """
        copy, sent = self.remote.copy(place, serial, self.pace), 0
        directory = self.local.locate(step)
        for file in files:
            with SourceFile(directory, file.path, file.size_bytes) as source:
                sent += copy.send(source)
        return sent

    def read_back(self, where: str | Path, files: Sequence[FileRecord]) -> None:
        """Compare `files` at `where` in the remote tier. Raises what `read_back` raises."""
        read_back(files, where, self.remote.writer.open_source, self.pace.wait)

    def tell(self, entries: Sequence[Queued]) -> None:
        """Let other ranks know the states of the copies; there are none."""

    def end(self) -> None:
        """The drain has ended."""
