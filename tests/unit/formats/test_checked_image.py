"""CheckedImage: checksums are right and at their places, for any order of the bytes."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from iobench.formats.checked_image import CheckedImage, RunningChecksums

_HEAD, _CRC, _TAIL = 3, 4, 5  # bytes before a part, of a checksum behind it, of the end


class File:
    """Parts with four bytes for a checksum after each, and five at the end for all of them."""

    def __init__(self, lengths: list[int]) -> None:
        rng = np.random.default_rng(len(lengths))
        self.parts: dict[int, np.ndarray] = {}
        self.texts: dict[int, bytearray] = {}
        self.finished = 0
        position = 0
        memories: list[Any] = []
        for length in lengths:
            head, part = bytearray(_HEAD), rng.integers(0, 256, length, np.uint8)
            position += _HEAD
            self.parts[position] = part
            self.texts[position] = bytearray(_CRC)
            position += length + _CRC
            memories += [head, part, self.texts[position - length - _CRC]]
        self.tail = bytearray(_TAIL)
        checksums = RunningChecksums(self.parts, self.put, self.finish)
        parts = [np.frombuffer(memory, dtype=np.uint8) for memory in [*memories, self.tail]]
        self.image = CheckedImage("file", parts, checksums)
        self.wanted = (
            b"".join(
                bytes(_HEAD) + part.tobytes() + zlib.crc32(part).to_bytes(_CRC, "little")
                for part in self.parts.values()
            )
            + b"whole"
        )

    def put(self, start: int, checksum: int) -> None:
        assert not any(self.texts[start])  # once
        self.texts[start][:] = checksum.to_bytes(_CRC, "little")

    def finish(self, checksums: object) -> None:
        assert checksums == {start: zlib.crc32(part) for start, part in self.parts.items()}
        self.tail[:] = b"whole"
        self.finished += 1

    def take(self, start: int, stop: int) -> bytes:
        return b"".join(view.tobytes() for view in self.image.views(start, stop))


_LENGTHS = st.lists(st.integers(0, 40), max_size=6)


@given(_LENGTHS, st.data())
def test_in_any_order(lengths: list[int], data: st.DataObject) -> None:
    """The bytes are those of the finished file, and no checksum is computed twice."""
    file = File(lengths)
    size = file.image.size_bytes
    cuts = data.draw(st.lists(st.tuples(st.integers(0, size), st.integers(0, size)), max_size=8))
    for one, other in cuts:
        start, stop = sorted((one, other))
        assert file.take(start, stop) == file.wanted[start:stop]
    assert file.take(0, size) == file.wanted
    assert file.take(0, size) == file.wanted
    assert file.finished == 1


def test_nothing_is_computed_before_it_is_needed() -> None:
    """The first access to a byte behind a part inserts its checksum."""
    file = File([100, 100])
    file.take(0, _HEAD + 99)
    assert not any(any(text) for text in file.texts.values())
    file.take(_HEAD + 100, _HEAD + 101)
    assert [any(text) for text in file.texts.values()] == [True, False]
