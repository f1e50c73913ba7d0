"""WriterHarness: one writer and one place, and the steps that checks are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from iobench.testing.content import empty_like
from iobench.testing.expect import expect, expect_same
from iobench.testing.target import TestTarget
from iobench.writers.base import Writer
from iobench.writers.image import Bytes, FileImage
from iobench.writers.stream import Stream
from iobench.writers.transfer import Transfer

__all__ = ["MakeWriter", "WriterHarness"]

MakeWriter = Callable[[], Writer]
"""Makes the writer under test anew, always with the same options."""

_LARGEST_BLOCK = 1 << 20


class WriterHarness:
    """What a check works with. Knows which names the check made, so that others are leftovers."""

    def __init__(self, make_writer: MakeWriter, place: TestTarget) -> None:
        self.make_writer, self.place = make_writer, place
        self.writer = make_writer()
        self.stores = self.writer.stores
        self._made: set[str] = set()

    @property
    def block_size(self) -> int:
        """The writer's block in bytes; 1 MiB for a writer that has none or a larger one."""
        size = getattr(self.writer.options, "block_size", None)
        return size if isinstance(size, int) and size <= _LARGEST_BLOCK else 1 << 20

    def image(self, name: str, *memories: Any) -> FileImage:
        """The image `name` of `memories`."""
        return FileImage.of(name, memories)

    def write(self, image: FileImage, **how: bool) -> Transfer:
        """Write `image`; its name is then one that may be there."""
        self._made.add(image.path)
        return self.writer.write(image, self.place.target, **how)

    def read(self, image: FileImage, **where: int) -> Transfer:
        """Fill `image`."""
        return self.writer.read(image, self.place.target, **where)

    def open(self, name: str, size: int | None = None) -> Stream:
        """A stream to `name`; it is then a name that may be there."""
        self._made.add(name)
        return self.writer.open(self.place.locate(name), size)

    def put(self, name: str, data: bytes) -> None:
        """Have `data` under `name`, not by the writer."""
        self._made.add(name)
        self.place.put(name, data)

    def expect_stored(self, name: str, wanted: bytes | Bytes) -> None:
        """Exactly `wanted` is under `name`; a writer that stores nothing is let off."""
        if self.stores:
            expect_same(self.place.stored(name), wanted, name)

    def expect_nothing(self, name: str) -> None:
        """Nothing is under `name`, and nothing is left beside it."""
        expect(self.place.stored(name) is None, f"{name}: is there, nothing was expected")
        self.expect_no_leftovers()

    def expect_round_trip(self, image: FileImage, wanted: Bytes) -> None:
        """`image` is stored as `wanted` and comes back into other memory."""
        self.write(image)
        self.expect_stored(image.path, wanted)
        back = empty_like(image)
        self.read(back)
        if self.stores:
            found = b"".join(view.tobytes() for view in back.views(0, back.size_bytes))
            expect_same(found, wanted, f"{image.path} read back")

    def expect_no_leftovers(self) -> None:
        """Only names that the check made are in the place."""
        strange = self.place.names() - self._made
        expect(not strange, f"left behind: {', '.join(sorted(strange))}")
