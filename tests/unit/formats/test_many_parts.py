"""PartsImage: the same pieces as a FileImage of the same memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iobench.errors import UsageError
from iobench.formats.many_parts import PartsImage
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
