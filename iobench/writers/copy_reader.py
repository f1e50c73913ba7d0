"""CopyReader: reads the files of a checkpoint from the nearest of its copies."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from iobench.writers.base import Writer
from iobench.writers.image import FileImage, Ranges
from iobench.writers.source import Source
from iobench.writers.transfer import Transfer

__all__ = ["CopyReader", "StoredReader"]


class CopyReader(Protocol):
    """The files of one checkpoint. Copies form a chain: each has the next one or is the last.

    A copy reads from the next one what it lacks. What it has damaged is read from there when
    `read_again` asks for it. Thread-safe.
    """

    @property
    def name(self) -> str:
        """The name of the writer that reads it, for a Transfer."""

    @property
    def direct(self) -> bool:
        """Whether it is read past the page cache; see Writer.direct."""

    @property
    def location(self) -> str | Path:
        """The directory or prefix of the files, for messages."""

    def read(self, image: FileImage, ranges: Ranges | None = None) -> Transfer:
        """Fill these ranges of the image of a file, or all of it; see Writer.read_ranges."""

    def read_again(self, image: FileImage, start: int, stop: int, piece: str) -> bool:
        """Fill the range of `piece`, which is damaged, from the next copy. False: none is left.

        Call it again if it is damaged there too.
        """

    def open_source(self, target: str) -> Source:
        """Open the file `target`, which is in `location`, to inspect it."""


class StoredReader:
    """What `writer` reads at `location`: the last copy of a chain."""

    def __init__(self, writer: Writer, location: str | Path) -> None:
        self._writer, self.location = writer, location
        self.name, self.direct = writer.name, writer.direct

    def read(self, image: FileImage, ranges: Ranges | None = None) -> Transfer:
        if ranges is None:
            return self._writer.read(image, self.location)
        return self._writer.read_ranges(image, self.location, ranges)

    def read_again(self, image: FileImage, start: int, stop: int, piece: str) -> bool:
        del image, start, stop, piece
        return False

    def open_source(self, target: str) -> Source:
        return self._writer.open_source(target)
