"""DirectoryCopy: a checkpoint that is being copied to another directory."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np

from iobench.checkpoint.lock import DirectoryLock
from iobench.checkpoint.manifest import MANIFEST
from iobench.checkpoint.staged import StagedCheckpoint
from iobench.errors import TargetError, transfer_errors
from iobench.regular_file import open_regular
from iobench.tiers.pace import DrainPace
from iobench.tiers.source_file import BLOCK_BYTES, SourceFile
from iobench.writers.image import Bytes
from iobench.writers.local.new_file import make_directories, sync_directory

__all__ = ["DRAINING_SUFFIX", "DirectoryCopy"]

DRAINING_SUFFIX = ".iobench-draining"

_SYNCED = 8  # blocks that one fdatasync makes durable: dirty memory stays small


class DirectoryCopy(StagedCheckpoint):
    """A RemoteCopy in a hidden directory next to `final`, which `publish` renames.

    Its name has the step and the serial number, so the next attempt finds it.
    """

    def __init__(
        self, final: Path, *, serial: int, pace: DrainPace, lock: DirectoryLock | None
    ) -> None:
        super().__init__(final, replace=True, lock=lock)
        self.directory = final.with_name(f".{final.name}.{serial}{DRAINING_SUFFIX}")
        self._pace = pace

    def send(self, source: SourceFile) -> int:
        path = self.directory / source.name
        with transfer_errors("copying to", path):
            make_directories(path.parent)
            fd = open_regular(path, os.O_RDWR | os.O_CREAT)
            try:
                sent = self._fill(fd, source)
                os.ftruncate(fd, source.size_bytes)
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
            sync_directory(path.parent)  # not by `publish` alone: another node may publish it
        return sent

    def check(self, name: str, size_bytes: int) -> None:
        path = self.directory / name
        found = path.stat().st_size if path.exists() else None
        if found != size_bytes:
            raise TargetError(
                f"{path}: another rank has copied its {size_bytes} bytes, but this rank sees "
                f"{'no such file' if found is None else f'{found} bytes'}; the remote tier must be "
                "one directory that all nodes share"
            )

    def _fill(self, fd: int, source: SourceFile) -> int:
        """Write the blocks that the file does not have; return their bytes."""
        have, sent, unsynced = os.fstat(fd).st_size, 0, 0
        for number, block in enumerate(source.blocks()):
            start = number * BLOCK_BYTES
            if start + len(block) <= have and _same(fd, start, block):
                continue
            with self._pace.moving(len(block)):
                _write(fd, start, block)
                sent, unsynced = sent + len(block), unsynced + 1
                if unsynced == _SYNCED:
                    os.fdatasync(fd)
                    unsynced = 0
        return sent

    def publish(self, manifest: bytes) -> None:  # type: ignore[override]  # of one part
        with transfer_errors("copying to", self.directory), contextlib.suppress(FileNotFoundError):
            os.unlink(self.directory / MANIFEST)  # of an attempt that was killed
        super().publish([manifest])
        self._remove()  # the replaced checkpoint, which has this name now


def _same(fd: int, start: int, block: Bytes) -> bool:
    """Return whether the file has the bytes of `block` at `start`."""
    found = os.pread(fd, len(block), start)
    return len(found) == len(block) and bool(
        np.array_equal(np.frombuffer(found, dtype=np.uint8), block)
    )


def _write(fd: int, start: int, block: Bytes) -> None:
    done = 0
    while done < len(block):
        done += os.pwrite(fd, block.data[done:], start + done)
