"""MemoryFirst: reads the file of this rank from memory, and everything else from storage."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from iobench.remote.memory_reader import MemoryReader
from iobench.units import format_size
from iobench.writers.base import Writer
from iobench.writers.image import FileImage
from iobench.writers.transfer import Transfer

__all__ = ["MemoryFirst"]


class MemoryFirst:
    """The read side of `writer`, for the checkpoint of `step` at `location`.

    `file`, which the memory `tier` has, is read there. A piece of it that is damaged is read from
    storage; `damaged` is called then. After `leave` everything is.
    """

    def __init__(
        self,
        writer: Writer,
        step: int,
        location: str | Path,
        file: FileImage,
        tier: str,
        damaged: Callable[[], None],
    ) -> None:
        self.step = step
        self._writer, self._location, self._tier = writer, str(location), tier
        self._file, self._memory, self._damaged = file.path, MemoryReader([file]), damaged
        self._left, self._problem, self._stored_bytes = False, "", 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def read(
        self, image: FileImage, target: str | Path, *, start: int = 0, stop: int | None = None
    ) -> Transfer:
        """Fill bytes [start, stop) of the image; see Writer.read."""
        if self._left or str(target) != self._location or image.path != self._file:
            return self._writer.read(image, target, start=start, stop=stop)
        return self._memory.read(image, target, start=start, stop=stop)

    def read_again(self, image: FileImage, target: str | Path, start: int, stop: int) -> bool:
        """Fill a damaged range from storage; False: it was read there."""
        if self._left or str(target) != self._location:
            again = getattr(self._writer, "read_again", None)  # of a load from two tiers
            return again is not None and bool(again(image, target, start, stop))
        self._problem = self._problem or f"{image.path} is damaged"
        self._stored_bytes += stop - start
        self._damaged()
        self._writer.read(image, target, start=start, stop=stop)
        return True

    def leave(self, problem: str) -> bool:
        """Read from storage alone from now on; False: it is so already."""
        if self._left:
            return False
        self._left, self._problem = True, self._problem or problem
        self._damaged()
        return True

    def sources(self, storage: Callable[[], dict[str, str]], location: str) -> dict[str, str]:
        """Return the tiers that were read; `storage` returns what a load from there says.

        Warns (RuntimeWarning) if a part of the bytes is not from memory because of damage.
        """
        if not self._problem:
            return {self._tier: "read"}
        warnings.warn(
            f"the file of this rank is not read from {self._tier} alone: {self._problem}",
            RuntimeWarning,
            stacklevel=2,
        )
        if self._left:
            return {self._tier: self._problem, **storage()}
        again = f"read {format_size(self._stored_bytes)}"
        return {self._tier: f"read in part; {self._problem}", location: again}
