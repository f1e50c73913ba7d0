"""Slices: every byte once, shares that are equal, and files that are read as if they were whole."""

from __future__ import annotations

import io
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iobench.bench.data.sliced_files import ALL, OFF, SlicedFiles, SliceImage, Slicing
from iobench.bench.processes.job import own_name
from iobench.errors import DataMismatchError, TransferError
from iobench.units import KIB
from iobench.writers.buffered import BufferedWriter
from iobench.writers.image import FileImage

_SIZES = st.lists(st.integers(0, 400 * KIB), min_size=1, max_size=4)
_NODES = st.sampled_from([(0,), (0, 0), (0, 1), (0, 0, 1), (0, 0, 1, 1)])
_HOW = st.sampled_from([OFF, ALL, "1", "2"])


@given(_SIZES, _NODES, _HOW)
def test_every_byte_belongs_to_one_job(sizes: list[int], nodes: tuple[int, ...], how: str) -> None:
    """In file order, also of empty files; `off` has one writer, and a number so many per node."""
    names = [f"file-{number}" for number in range(len(sizes))]
    made = Slicing(names, sizes, nodes, how)
    for name, size in zip(names, sizes, strict=True):
        parts = made.slices[name]
        assert parts
        assert (parts[0].start, parts[-1].stop) == (0, size)
        assert all(a.stop == b.start for a, b in itertools.pairwise(parts))
    writers = {job for job, ranges in enumerate(made.ranges) if ranges}
    assert how != OFF or writers == {0}
    if how.isdigit():
        for node in set(nodes):
            assert sum(nodes[job] == node for job in writers) <= int(how)


def _saved(place: Path, sizes: Sequence[int], nodes: Sequence[int]) -> tuple[Slicing, list[bytes]]:
    """Save files of these sizes in slices."""
    random = np.random.default_rng(1)
    contents = [random.integers(0, 256, size, np.uint8) for size in sizes]
    made = Slicing([f"d/{number}" for number in range(len(sizes))], sizes, nodes, ALL)
    writer = BufferedWriter()
    for job, ranges in enumerate(made.ranges):
        for number, start, stop in ranges:
            halves = np.array_split(contents[number], 2)
            whole = FileImage.of(f"d/{number}", halves)
            image = SliceImage(whole, start, stop, whole.path)
            writer.write(image, place / own_name(job), durable=False)
    return made, [content.tobytes() for content in contents]


class _Noting(FileImage):
    """Notes which bytes were reported as filled."""

    def filled(self, start: int, stop: int) -> None:
        self.noted[start:stop] = True

    noted: np.ndarray[tuple[int], np.dtype[np.bool_]]


@settings(max_examples=30)
@given(_SIZES, _NODES, st.data())
def test_slices_are_read_like_whole_files(
    sizes: list[int], nodes: tuple[int, ...], data: st.DataObject
) -> None:
    """Any range: its bytes, and no others, are filled and reported; a source reads it too."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        made, contents = _saved(place, sizes, nodes)
        files = SlicedFiles(BufferedWriter(), place, made.slices, own_name)
        for number, content in enumerate(contents):
            start = data.draw(st.integers(0, len(content)))
            stop = data.draw(st.integers(start, len(content)))
            memory = np.zeros(len(content), np.uint8)
            image = _Noting.of(f"d/{number}", [memory[:777], memory[777:]])
            object.__setattr__(image, "noted", np.zeros(len(content), bool))
            done = files.read(image, place, start=start, stop=stop)
            assert done.bytes == stop - start
            expected = np.zeros(len(content), np.uint8)
            expected[start:stop] = np.frombuffer(content, np.uint8)[start:stop]
            assert np.array_equal(memory, expected)
            assert image.noted.sum() == stop - start
            assert image.noted[start:stop].all()
            source = files.open_source(f"{place}/d/{number}")
            try:
                assert source.seek(0, io.SEEK_END) == len(content)
                source.seek(start)
                found = b""
                while len(found) < stop - start and (part := source.read(stop - start)):
                    found += part
                assert found[: stop - start] == content[start:stop]
                assert source.read_at([start, 0], 5) == [content[start : start + 5], content[:5]]
            finally:
                source.close()


def test_damage_of_a_slice_is_found(tmp_path: Path) -> None:
    """One that is too short, and one that is missing."""
    made, _ = _saved(tmp_path, [300 * KIB], (0, 1))
    files = SlicedFiles(BufferedWriter(), tmp_path, made.slices, own_name)
    second = tmp_path / own_name(1) / "d/0"
    second.write_bytes(second.read_bytes()[:-1])
    image = FileImage.of("d/0", [np.zeros(300 * KIB, np.uint8)])
    with pytest.raises(DataMismatchError):
        files.read(image, tmp_path)
    source = files.open_source(f"{tmp_path}/d/0")
    source.seek(-3, io.SEEK_END)
    with pytest.raises(DataMismatchError, match="slice of process 1"):
        source.read(3)
    source.close()
    second.unlink()
    with pytest.raises(TransferError):
        files.read(image, tmp_path)


def test_nothing_is_taken_of_the_whole_before_a_writer_asks() -> None:
    """Images that compute checksums while they are read would compute all of them."""

    class Asked(FileImage):
        def pieces(self, start: int, stop: int) -> list[object]:
            asked.append((start, stop))
            return super().pieces(start, stop)

    asked: list[tuple[int, int]] = []
    whole = Asked.of("whole", [np.arange(100, dtype=np.uint8), np.arange(50, dtype=np.uint8)])
    part = SliceImage(whole, 90, 120, "part")
    assert (part.size_bytes, part.path, asked) == (30, "part", [])
    assert [part.in_one_piece(0, 10), part.in_one_piece(0, 11)] == [True, False]
    assert b"".join(view.tobytes() for view in part.views(5, 12)) == bytes([*range(95, 100), 0, 1])
    assert asked == [(95, 102)]
    assert [(one.offset, one.length) for one in part.segments] == [(0, 10), (10, 20)]
    with pytest.raises(IndexError):
        part.pieces(0, 31)
    with pytest.raises(IndexError):
        SliceImage(whole, 100, 151, "part")
