"""Source: a stored file that is open for inspection, which a format does before a restore."""

from __future__ import annotations

import errno
import io
import os
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from iobench.regular_file import open_regular
from iobench.writers.image import Bytes, FileImage


class Source(Protocol):
    """A binary file object that reads, seeks, and fetches many small ranges in one call."""

    def read(self, size: int = -1, /) -> bytes:
        """Return the next `size` bytes, or with -1 all to the end of the file."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move to `offset` from the start (0), the position (1) or the end (2); return it."""

    def tell(self) -> int:
        """Return the position."""

    def close(self) -> None:
        """Release the file."""

    def read_at(self, offsets: Iterable[int], size: int) -> list[bytes]:
        """Return up to `size` bytes at each of `offsets`; fewer at the end of the file."""


class LocalSource(io.FileIO):
    """A regular file of a mounted file system. Raises the OSError of `open_regular`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(os.fspath(path), "rb", opener=lambda name, _: open_regular(name))

    def read_at(self, offsets: Iterable[int], size: int) -> list[bytes]:
        """Return up to `size` bytes at each of `offsets`; fewer at the end of the file."""
        return [os.pread(self.fileno(), size, offset) for offset in offsets]


class BytesSource(io.BytesIO):
    """A small file whose bytes are in memory, for many small reads."""

    def read_at(self, offsets: Iterable[int], size: int) -> list[bytes]:
        data = self.getbuffer()
        return [bytes(data[offset : offset + size]) for offset in offsets]


class RangeSource(io.RawIOBase):
    """A Source of `size_bytes`; a subclass reads its ranges."""

    size_bytes: int

    def __init__(self) -> None:
        super().__init__()
        self._position = 0

    @abstractmethod
    def _fill(self, offset: int, room: Bytes) -> int:
        """Copy bytes from `offset` into `room`, up to the end of the file; return the count."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size_bytes}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, f"a seek to {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` from the position, up to the end of the file; return the count."""
        count = self._fill(self._position, np.frombuffer(buffer, dtype=np.uint8))
        self._position += count
        return count

    def read_at(self, offsets: Iterable[int], size: int) -> list[bytes]:
        """Return up to `size` bytes at each of `offsets`; fewer at the end of the file."""
        found = []
        for offset in offsets:
            room = np.empty(size, dtype=np.uint8)
            found.append(room[: self._fill(offset, room)].tobytes())
        return found


class ImageSource(RangeSource):
    """A file whose bytes are in memory, independent of the file that they were read from."""

    def __init__(self, image: FileImage) -> None:
        super().__init__()
        self._image, self.size_bytes = image, image.size_bytes

    def _fill(self, offset: int, room: Bytes) -> int:
        start = min(offset, self.size_bytes)
        return self._image.gather(start, min(start + len(room), self.size_bytes), room)
