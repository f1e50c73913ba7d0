"""Decides whether an error means that a checkpoint is damaged."""

from __future__ import annotations

import errno
from pathlib import Path

from iobench.errors import DataMismatchError, TransferError

__all__ = ["damage_of"]


def damage_of(
    error: DataMismatchError | TransferError, location: str | Path
) -> DataMismatchError | None:
    """Return `error` as damage of the checkpoint; None for other errors, such as a lost network."""
    if isinstance(error, DataMismatchError):
        return error
    unreadable = error.errno == errno.EIO and isinstance(location, Path)  # a bad block of a disk
    return DataMismatchError(str(error)) if error.errno == errno.ENOENT or unreadable else None
