"""WriterHarness: one writer and one target, and the steps that checks consist of.

Assertions raise AssertionError under `python -O` too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from iobench.testing.content import empty_like
from iobench.testing.target import TestTarget
from iobench.writers.base import Writer
from iobench.writers.image import Bytes, FileImage
from iobench.writers.stream import BlockStream
from iobench.writers.transfer import Transfer

MakeWriter = Callable[[], Writer]
"""Returns a new writer under test, always with the same options."""

_LARGEST_BLOCK = 1 << 20
_E = TypeVar("_E", bound=BaseException)


def expect(holds: object, otherwise: str) -> None:
    """Raise AssertionError with the text `otherwise` unless `holds`."""
    if not holds:
        raise AssertionError(otherwise)


def expect_same(found: bytes | Bytes | None, wanted: bytes | Bytes, what: str) -> None:
    """Raise AssertionError unless both hold equal bytes. It names the first byte that differs."""
    if found is None:
        raise AssertionError(f"{what}: does not exist, {len(wanted)} bytes were expected")
    have, want = (np.frombuffer(x, dtype=np.uint8) for x in (found, wanted))
    if len(have) != len(want):
        raise AssertionError(f"{what}: {len(have)} bytes, {len(want)} were expected")
    if not np.array_equal(have, want):
        first = int(np.argmax(have != want))
        raise AssertionError(
            f"{what}: byte {first} of {len(want)} is {have[first]}, {want[first]} was expected"
        )


def expect_raises(kind: type[_E], call: Callable[..., Any], *args: Any, **kwargs: Any) -> _E:
    """Return the error of `kind` that `call(*args, **kwargs)` raises.

    Raises AssertionError if the call raises nothing. An error of another kind propagates.
    """
    try:
        call(*args, **kwargs)
    except kind as error:
        # Its frames keep objects alive whose descriptors and threads the caller counts.
        return error.with_traceback(None)
    raise AssertionError(f"{kind.__name__} was expected, nothing was raised")


class WriterHarness:
    """The argument of a check. It records the names that the check uses; others are leftovers."""

    def __init__(self, make_writer: MakeWriter, test_target: TestTarget) -> None:
        self.make_writer, self.test_target = make_writer, test_target
        self.writer = make_writer()
        self.stores = self.writer.stores
        self._made: set[str] = set()

    @property
    def block_size(self) -> int:
        """The writer's block size in bytes; 1 MiB if it has none or a larger one."""
        size = getattr(self.writer.options, "block_size", None)
        return size if isinstance(size, int) and size <= _LARGEST_BLOCK else 1 << 20

    def image(self, name: str, *memories: Any) -> FileImage:
        """Return the image `name` of `memories`."""
        return FileImage.of(name, memories)

    def write(self, image: FileImage, **how: bool) -> Transfer:
        """Write `image` and record its name."""
        self._made.add(image.path)
        return self.writer.write(image, self.test_target.target, **how)

    def read(self, image: FileImage, **where: int) -> Transfer:
        """Fill `image`."""
        return self.writer.read(image, self.test_target.target, **where)

    def open(self, name: str, size: int | None = None) -> BlockStream:
        """Open a stream to `name` and record the name."""
        self._made.add(name)
        return self.writer.open(self.test_target.locate(name), size)

    def put(self, name: str, data: bytes) -> None:
        """Store `data` under `name` without the writer, and record the name."""
        self._made.add(name)
        self.test_target.put(name, data)

    def expect_stored(self, name: str, wanted: bytes | Bytes) -> None:
        """Require exactly `wanted` under `name`. A writer that stores nothing passes."""
        if self.stores:
            expect_same(self.test_target.stored(name), wanted, name)

    def expect_nothing(self, name: str) -> None:
        """Require that `name` does not exist, and that there are no leftovers."""
        expect(self.test_target.stored(name) is None, f"{name}: exists, nothing was expected")
        self.expect_no_leftovers()

    def expect_round_trip(self, image: FileImage, wanted: Bytes) -> None:
        """Require that `image` is stored as `wanted` and read back equal into other memory."""
        self.write(image)
        self.expect_stored(image.path, wanted)
        back = empty_like(image)
        self.read(back)
        if self.stores:
            found = b"".join(view.tobytes() for view in back.views(0, back.size_bytes))
            expect_same(found, wanted, f"{image.path} read back")

    def expect_no_leftovers(self) -> None:
        """Require that the target has only names that the check created."""
        leftovers = self.test_target.names() - self._made
        expect(not leftovers, f"left behind: {', '.join(sorted(leftovers))}")
