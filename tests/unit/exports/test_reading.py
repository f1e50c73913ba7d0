"""read_tensors: any cut of a tensor into parts, and any size of pieces, gives the same bytes."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from iobench.errors import DataMismatchError, UsageError
from iobench.exports.source import check_fits, read_tensors
from iobench.verification.inventory import CheckedRange, FileTree, ListedTensor, TensorPart
from iobench.writers.buffered import BufferedWriter


def _cut(array: np.ndarray, cuts: list[list[int]], at: Path) -> tuple[TensorPart, ...]:
    """Write the boxes between `cuts` of each dimension to a file, with gaps, the last one first."""
    edges = [
        list(itertools.pairwise(sorted({0, size, *(c % (size + 1) for c in cut)})))
        for size, cut in zip(array.shape, cuts, strict=True)
    ]
    parts, data = [], bytearray(b"gap")
    for box in reversed(list(itertools.product(*edges))):
        piece = array[tuple(slice(a, b) for a, b in box)].tobytes()
        offsets, sizes = tuple(a for a, _ in box), tuple(b - a for a, b in box)
        parts.append(TensorPart(at.name, len(data), len(data) + len(piece), offsets, sizes))
        data += piece + b"gap"
    at.write_bytes(data)
    return tuple(parts)


@pytest.mark.slow
@given(
    shape=st.lists(st.integers(1, 9), min_size=0, max_size=4),
    cuts=st.lists(st.lists(st.integers(0, 9), max_size=2), min_size=4, max_size=4),
    width=st.sampled_from(["uint8", "int16", "float32", "int64", "complex128"]),
    piece=st.integers(1, 4096),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_parts(
    shape: list[int], cuts: list[list[int]], width: str, piece: int, tmp_path: Path
) -> None:
    """Two tensors, one cut in any way, in pieces of any size; every part has a checksum."""
    size = int(np.prod(shape)) * np.dtype(width).itemsize
    array = np.random.default_rng(0).bytes(size)
    whole = np.frombuffer(array, dtype=width).reshape(shape)
    parts = _cut(whole, cuts[: len(shape)], tmp_path / "a")
    (tmp_path / "b").write_bytes(array)
    plain = TensorPart("b", 0, size, (0,) * len(shape), tuple(shape))
    tensors = [
        ListedTensor("a", width, tuple(shape), parts),
        ListedTensor("b", width, tuple(shape), (plain,)),
    ]
    expected = {
        part[:3]: CheckedRange(
            part.start,
            part.stop,
            "",
            xxhash.xxh3_64_hexdigest((tmp_path / part.file).read_bytes()[part.start : part.stop]),
        )
        for part in (*parts, plain)
    }
    location = FileTree(tmp_path, BufferedWriter())
    piece_bytes = max(piece, np.dtype(width).itemsize)
    found = {0: b"", 1: b""}
    for number, data in read_tensors(location, tensors, expected, piece_bytes=piece_bytes):
        assert len(data) <= max(piece_bytes, size)
        found[number] += data.tobytes()
    assert found == {0: array, 1: array}


def test_damage_is_named(tmp_path: Path) -> None:
    """A part whose checksum differs, XXH3 or CRC-32. Parts that overlap have as many elements as
    the tensor, but not each of them."""
    (tmp_path / "a").write_bytes(bytes(100))
    tensor = ListedTensor("x.y", "uint8", (100,), (TensorPart("a", 0, 100, (0,), (100,)),))
    location = FileTree(tmp_path, BufferedWriter())
    for wrong in (CheckedRange(0, 100, "", "0" * 16), CheckedRange(0, 100, "", crc32=5)):
        with pytest.raises(DataMismatchError, match=r"/a: damaged, the checksum of x\.y differs"):
            list(read_tensors(location, [tensor], {("a", 0, 100): wrong}, piece_bytes=64))
    parts = tuple(TensorPart("a", 0, 50, (at,), (50,)) for at in (0, 10))
    twice = ListedTensor("x", "uint8", (100,), parts)
    with pytest.raises(DataMismatchError, match="parts of it overlap"):
        list(read_tensors(location, [twice], {}, piece_bytes=64))


def test_a_transposed_tensor(tmp_path: Path) -> None:
    """It is read row by row if it fits into memory, and refused otherwise."""
    values = torch.arange(60, dtype=torch.int32).reshape(10, 6)
    (tmp_path / "a").write_bytes(b"123" + values.numpy().tobytes())
    part = TensorPart("a", 3, 243, (0, 0), (6, 10), (1, 6))
    tensor = ListedTensor("x", "int32", (6, 10), (part,))
    location = FileTree(tmp_path, BufferedWriter())
    ((_, data),) = read_tensors(location, [tensor], {}, piece_bytes=64)
    assert data.tobytes() == values.t().contiguous().numpy().tobytes()
    check_fits(tensor, "x", 720)
    with pytest.raises(UsageError, match=r"x is not stored row by row.*720.*memory is 719"):
        check_fits(tensor, "x", 719)
