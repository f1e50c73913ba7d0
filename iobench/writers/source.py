"""Source: a stored file opened for looking into it, as a format does before it restores."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from typing import Protocol

__all__ = ["LocalSource", "Source"]


class Source(Protocol):
    """A binary file object that reads and seeks, and can fetch many small ranges at once."""

    def read(self, size: int = -1, /) -> bytes: ...
    def seek(self, offset: int, whence: int = 0, /) -> int: ...
    def tell(self) -> int: ...
    def close(self) -> None: ...

    def read_at(self, offsets: Iterable[int], size: int) -> list[bytes]:
        """Up to `size` bytes at each of `offsets`, fewer at the end of the file."""


class LocalSource(io.FileIO):
    """A file of a mounted file system. Raises the OSError of open(2) as it is."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(os.fspath(path), "rb")

    def read_at(self, offsets: Iterable[int], size: int) -> list[bytes]:
        return [os.pread(self.fileno(), size, offset) for offset in offsets]
