"""A file in memory as a Source: it reads and seeks like a file."""

from __future__ import annotations

import errno
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iobench.writers.base import ImageSource
from iobench.writers.image import FileImage

_steps = st.lists(
    st.tuples(st.integers(-20, 40), st.sampled_from([0, 1, 2]), st.integers(-1, 30)), max_size=8
)


@given(st.lists(st.binary(max_size=12), max_size=4), _steps)
def test_as_a_file(pieces: list[bytes], steps: list[tuple[int, int, int]]) -> None:
    """Any seek and read; before the start it raises EINVAL, past the end it returns no bytes."""
    data = b"".join(pieces)
    source, file = ImageSource(FileImage.of("x", pieces)), io.BytesIO(data)
    assert source.size_bytes == len(data)
    for offset, whence, size in steps:
        base = (0, file.tell(), len(data))[whence]
        if base + offset < 0:
            with pytest.raises(OSError, match="a seek to") as caught:
                source.seek(offset, whence)
            assert caught.value.errno == errno.EINVAL
            continue
        assert source.seek(offset, whence) == file.seek(base + offset) == source.tell()
        assert source.read(size) == file.read(size)
        assert source.tell() == file.tell()


def test_ranges() -> None:
    """Many ranges at once; the last one is shorter."""
    source = ImageSource(FileImage.of("x", [b"hello", b" world"]))
    assert source.read_at([3, 0, 9, 50], 4) == [b"lo w", b"hell", b"ld", b""]
