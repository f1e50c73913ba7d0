"""MemoryReader: reads a checkpoint whose files are in memory."""

from __future__ import annotations

import os
from pathlib import Path

from iobench import linux
from iobench.errors import DataMismatchError
from iobench.units import MIB
from iobench.writers.blocks.pages import make_pages
from iobench.writers.blocks.workers import Blocks, run_workers
from iobench.writers.image import FileImage
from iobench.writers.source import ImageSource, Source
from iobench.writers.transfer import Meter, Transfer

__all__ = ["MemoryReader"]

_BLOCK = 4 * MIB  # the checksum that follows finds it in the cache of the CPU
_MOST_THREADS = 8


class MemoryReader:
    """The copy of a checkpoint whose files are the images `files`. `location` is for messages."""

    name, direct = "memory", False

    def __init__(self, files: list[FileImage], location: str | Path) -> None:
        self.location = location
        self._files = {image.path: image for image in files}

    def open_source(self, target: str) -> Source:
        return ImageSource(self._files[os.path.basename(target)])

    def read_again(self, image: FileImage, start: int, stop: int, piece: str) -> bool:
        del image, start, stop, piece
        return False

    def read(self, image: FileImage, start: int = 0, stop: int | None = None) -> Transfer:
        """Copy bytes [start, stop) of the file. Raises DataMismatchError for another size."""
        source, meter = self._files[image.path], Meter()
        if source.size_bytes != image.size_bytes:
            raise DataMismatchError(
                f"{os.path.join(self.location, image.path)}: has {image.size_bytes} bytes, and "
                f"{source.size_bytes} in memory"
            )

        def work(blocks: Blocks, _: Meter) -> None:
            for start, stop in blocks:
                for view in image.views(start, stop):
                    if view.ctypes.data % linux.PAGE == 0:  # by one call: half the time of faults
                        make_pages(view)
                position = start
                for view in source.views(start, stop):
                    position += image.scatter(position, position + len(view), view)
                image.filled(start, stop)

        stop = image.size_bytes if stop is None else stop
        threads = min(_MOST_THREADS, os.cpu_count() or 1)
        run_workers(threads, Blocks(start, stop, _BLOCK), work, meter)
        return meter.transfer(self.name, "read", stop - start, durable=False)
