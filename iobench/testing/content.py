"""Test data: incompressible bytes, equal in every run and different for every seed."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np

from iobench.errors import TransferError
from iobench.writers.image import Bytes, FileImage

_PERIOD = 1_048_583  # a prime, so that no two blocks of one size are equal


@functools.cache
def _pool() -> Bytes:
    return np.random.default_rng(20).integers(0, 256, _PERIOD, dtype=np.uint8)


def content(size_bytes: int, seed: int = 0) -> Bytes:
    """Return `size_bytes` bytes of test data in new memory."""
    found = np.empty(size_bytes, dtype=np.uint8)
    done, begin = 0, -7919 * seed % _PERIOD
    while done < size_bytes:
        part = _pool()[begin : begin + size_bytes - done]
        found[done : done + len(part)] = part
        done, begin = done + len(part), 0
    return found


def content_at(address: int, size_bytes: int, seed: int = 0) -> Bytes:
    """Return `content` in memory that begins `address` bytes after a page boundary."""
    room = np.empty(size_bytes + 2 * 4096, dtype=np.uint8)
    begin = -room.ctypes.data % 4096 + address
    view = room[begin : begin + size_bytes]
    view[:] = content(size_bytes, seed)
    return view


def cut(data: Bytes, lengths: Iterable[int]) -> list[Bytes]:
    """Return consecutive views of `data` with these lengths. The rest, if any, is the last view."""
    pieces, begin = [], 0
    for length in lengths:
        pieces.append(data[begin : begin + length])
        begin += length
    return [*pieces, data[begin:]] if begin < len(data) else pieces


def empty_like(image: FileImage) -> FileImage:
    """Return an image with segments of the same lengths in new memory, filled with 0xA5."""
    memories = [np.full(segment.length, 0xA5, dtype=np.uint8) for segment in image.segments]
    return FileImage.of(image.path, memories)


class BrokenImage(FileImage):
    """An image that raises at byte `breaks_at`, like a device that fails during a transfer."""

    breaks_at = 0

    @classmethod
    def at(cls, path: str, memory: Any, breaks_at: int) -> BrokenImage:
        """Return an image of `memory` whose byte `breaks_at` is broken."""
        image = cls.of(path, [memory])
        image.breaks_at = breaks_at
        return image

    def views(self, start: int, stop: int) -> list[Bytes]:
        if start <= self.breaks_at < stop:
            raise TransferError(f"{self.path}: byte {self.breaks_at} is broken")
        return super().views(start, stop)
