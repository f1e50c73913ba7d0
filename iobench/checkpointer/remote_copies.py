"""RemoteCopies: where the remote tier has a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from iobench.checkpoint.manifest import Manifest
from iobench.writers.base import Writer

__all__ = ["RemoteCopies"]


class RemoteCopies(Protocol):
    """The checkpoints of the remote tier."""

    def remote_copy(self, manifest: Manifest) -> tuple[str | Path, Writer] | None:
        """Return where the remote tier has this very save, and a writer that reads it.

        None if it does not have it. Raises TransferError, DataMismatchError.
        """
