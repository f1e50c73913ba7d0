"""InspectedFile: a Source that records the bytes it returned, for comparison with a later read."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any, Self

from iobench.errors import DataMismatchError, transfer_errors
from iobench.writers.base import CopyReader, LocalSource, Source, Writer
from iobench.writers.device.base import DeviceBytes
from iobench.writers.image import FileImage

Inspectable = Writer | CopyReader
"""What opens files to inspect them."""


class InspectedFile(io.RawIOBase):
    """A file whose header or index a format reads before it can restore the file.

    The restore opens the file by name again. If another file got this name in between, its bytes
    would be read with the wrong header. `check` finds this.
    """

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source = source
        self._given: dict[int, bytes] = {}

    @classmethod
    @contextmanager
    def opened(cls, file: str, writer: Inspectable | None) -> Iterator[Self]:
        """Open `file` through `writer`, or in a mounted file system. Raises TransferError."""
        with transfer_errors("opening", file):
            source: Source = LocalSource(file) if writer is None else writer.open_source(file)
        with closing(source):
            yield cls(source)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer).cast("B")
        position = self._source.tell()
        data = self._source.read(len(room))
        room[: len(data)] = data
        self._remember(position, data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._source.seek(offset, whence)

    def tell(self) -> int:
        return self._source.tell()

    def read_at(self, offsets: Iterable[int], size: int) -> list[bytes]:
        listed = list(offsets)
        found = self._source.read_at(listed, size)
        for offset, data in zip(listed, found, strict=True):
            self._remember(offset, data)
        return found

    def _remember(self, offset: int, data: bytes) -> None:
        if len(data) > len(self._given.get(offset, b"")):
            self._given[offset] = data

    def check(self, file: str, image: FileImage) -> None:
        """Raise DataMismatchError unless the filled `image` has the bytes that were inspected.

        Bytes on a device are not compared: they are tensor data, which formats do not inspect.
        """
        for offset, data in self._given.items():
            position = 0
            for piece in image.pieces(offset, offset + len(data)):
                wanted = data[position : position + len(piece)]
                position += len(piece)
                if not isinstance(piece, DeviceBytes) and piece.tobytes() != wanted:
                    raise DataMismatchError(
                        f"{file}: was changed while it was read (the bytes near {offset} differ); "
                        "restore it again"
                    )
