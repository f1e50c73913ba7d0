"""PartsImage: the same pieces as a FileImage of the same memory. WindowImage: a part of a file."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iobench.errors import UsageError
from iobench.formats.many_parts import PartsImage, WindowImage
from iobench.writers.image import FileImage


@given(st.lists(st.integers(0, 9), max_size=8), st.data())
def test_like_an_image_of_segments(lengths: list[int], data: st.DataObject) -> None:
    """For every range, and for everything else that writers ask."""
    parts = [np.random.default_rng(n).integers(0, 256, n, np.uint8) for n in lengths]
    made, wanted = PartsImage("f", parts), FileImage.of("f", parts)
    assert (made.size_bytes, made.on_device, made.path) == (wanted.size_bytes, False, "f")
    first, second = (data.draw(st.integers(0, made.size_bytes)) for _ in range(2))
    start, stop = sorted((first, second))
    assert [v.tolist() for v in made.views(start, stop)] == [
        v.tolist() for v in wanted.views(start, stop)
    ]
    assert [(s.offset, s.length) for s in made.segments] == [
        (s.offset, s.length) for s in wanted.segments
    ]
    assert [(at, len(memory)) for at, memory in made.parts()] == [
        (at, len(memory)) for at, memory in wanted.parts()
    ]
    if start < stop:
        assert made.in_one_piece(start, stop) == wanted.in_one_piece(start, stop)


def test_what_it_refuses() -> None:
    with pytest.raises(UsageError, match="relative"):
        PartsImage("/f", [])
    image = PartsImage("f", [np.zeros(3, np.uint8)])
    assert image.writable
    with pytest.raises(IndexError):
        image.views(0, 4)
    frozen = np.zeros(3, np.uint8)
    frozen.flags.writeable = False
    assert not PartsImage("f", [np.zeros(1, np.uint8), frozen]).writable


def test_a_window() -> None:
    """The bytes in memory can be read, also up to the end of the file; others are refused."""
    memory = np.arange(8, dtype=np.uint8)
    image = WindowImage("f", 20, 14, memory)
    assert (image.size_bytes, image.writable, image.in_one_piece(15, 20)) == (20, True, True)
    assert [view.tolist() for view in image.views(15, 20)] == [[1, 2, 3, 4, 5]]
    assert [(at, part.tolist()) for at, part in image.parts()] == [(14, [0, 1, 2, 3, 4, 5])]
    for start, stop in ((13, 15), (0, 20), (14, 21)):
        with pytest.raises(IndexError):
            image.views(start, stop)
    with pytest.raises(IndexError):
        WindowImage("f", 20, 2, memory).views(3, 11)
