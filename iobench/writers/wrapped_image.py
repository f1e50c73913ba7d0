"""WrappedImage: a file image with the bytes of another one; subclasses look at what is moved."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from iobench.writers.image import AnyMemory, FileImage, HostBytes, Segment

__all__ = ["WrappedImage"]


class WrappedImage(FileImage):
    """The image `image`. No object is made for each of its segments."""

    def __init__(self, image: FileImage, **values: object) -> None:
        """`values` are further attributes."""
        values |= {name: getattr(image, name) for name in ("path", "size_bytes", "on_device")}
        for name, value in {**values, "_image": image}.items():
            object.__setattr__(self, name, value)  # a FileImage is frozen

    _image: FileImage

    @functools.cached_property
    def segments(self) -> tuple[Segment, ...]:
        return self._image.segments

    @functools.cached_property
    def _starts(self) -> Sequence[int]:
        return self._image._starts

    @property
    def writable(self) -> bool:
        return self._image.writable

    def parts(self) -> Iterator[tuple[int, AnyMemory]]:
        return self._image.parts()

    def pieces(self, start: int, stop: int) -> list[AnyMemory]:
        return self._image.pieces(start, stop)

    def in_one_piece(self, start: int, stop: int) -> bool:
        return self._image.in_one_piece(start, stop)

    def released(self, start: int, stop: int) -> None:
        self._image.released(start, stop)

    def filled(self, start: int, stop: int) -> None:
        self._image.filled(start, stop)

    def taken(self, start: int, stop: int, host_bytes: HostBytes) -> None:
        self._image.taken(start, stop, host_bytes)
