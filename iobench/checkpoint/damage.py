"""What an error says of a checkpoint: that it is damaged, or nothing."""

from __future__ import annotations

import errno
from pathlib import Path

from iobench.errors import DataMismatchError, TransferError

__all__ = ["damage_of"]


def damage_of(
    error: DataMismatchError | TransferError, location: str | Path
) -> DataMismatchError | None:
    """What `error` says of the checkpoint; None for what passes, as a store that is not reached."""
    if isinstance(error, DataMismatchError):
        return error
    unreadable = error.errno == errno.EIO and isinstance(location, Path)  # a bad block of a disk
    return DataMismatchError(str(error)) if error.errno == errno.ENOENT or unreadable else None
