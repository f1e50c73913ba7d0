"""Checksums of the pieces of a file: computed while it is written, some of them in the writer's
blocks, and compared while it is read, whichever of its bytes come first."""

from __future__ import annotations

import itertools
import random
import threading
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from iobench.checkpoint import checksums as module
from iobench.checkpoint.checksums import PieceDigests, compared, record_of, recorded
from iobench.checkpoint.manifest import Pieces
from iobench.errors import DataMismatchError
from iobench.units import KIB
from iobench.writers.image import FileImage
from iobench.writers.registry import make


def _image(sizes: list[int]) -> tuple[FileImage, bytes, Pieces, list[str]]:
    """Return an image of parts of these sizes, its bytes, its pieces and their checksums."""
    data = np.random.default_rng(len(sizes)).integers(0, 256, sum(sizes), np.uint8)
    ends = [0, *itertools.accumulate(sizes)]
    parts = [data[begin:end].copy() for begin, end in itertools.pairwise(ends)]
    digests = [xxhash.xxh3_64_hexdigest(part) for part in parts]
    pieces = [(str(number), size) for number, size in enumerate(sizes)]
    return FileImage.of_parts("file", parts), data.tobytes(), Pieces(pieces), digests


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any),
    cuts=st.lists(st.integers(0, 480), max_size=8),
    seed=st.integers(0, 99),
)
def test_whatever_is_copied_to_blocks(sizes: list[int], cuts: list[int], seed: int) -> None:
    """All checksums are there after the body, and each is that of the bytes of its piece alone."""
    image, data, pieces, digests = _image(sizes)
    rng = random.Random(seed)
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    ranges = list(itertools.pairwise(edges))
    rng.shuffle(ranges)
    with (
        mock.patch.object(module, "_SMALL", rng.choice([0, 20, 40])),
        recorded(image, pieces, by_block=True) as (sent, made),
    ):
        for start, stop in ranges:
            if rng.random() < 0.8:
                block = np.zeros(500, np.uint8)
                assert sent.gather(start, stop, block) == stop - start
                assert block[: stop - start].tobytes() == data[start:stop]
    assert made.found == digests
    assert [piece.xxh3_64 for piece in made.record().pieces] == digests
    assert made.record().size_bytes == len(data)


@pytest.mark.parametrize("name", ["buffered", "uncached", "odirect", "uring", "hybrid"])
def test_every_writer(name: str, tmp_path: Path) -> None:
    """The file and its checksums are right, by writers that copy to blocks and by others."""
    writer = make(name, block_size="64KiB")
    if not writer.available(tmp_path).ok:
        pytest.skip(f"{name} is not available here")
    rng = random.Random(name)
    sizes = [rng.choice([0, 1, 700, 5_000, 70_000, 200_000]) for _ in range(150)] + [33]
    image, data, pieces, digests = _image(sizes)
    in_blocks: list[int] = []
    compute_in = PieceDigests.compute_in

    def counted(self: PieceDigests, start: int, stop: int, block: np.ndarray) -> None:
        compute_in(self, start, stop, block)
        in_blocks.append(stop - start)

    with (
        mock.patch.object(PieceDigests, "compute_in", counted),
        recorded(image, pieces, by_block=writer.direct) as (sent, made),
    ):
        writer.write(sent, tmp_path)
    assert (tmp_path / "file").read_bytes() == data
    assert made.found == digests
    assert bool(in_blocks) == writer.direct


def test_a_writer_that_takes_the_memory_itself(tmp_path: Path) -> None:
    """A thread computes the checksums while it writes, as if no copies had been expected."""
    image, _, pieces, digests = _image([5_000] * 40)
    compute, threads = PieceDigests.compute, []

    def noted(self: PieceDigests, *, above: int = -1) -> None:
        threads.append((threading.current_thread().name, above))
        compute(self, above=above)

    with (
        mock.patch.object(PieceDigests, "compute", noted),
        recorded(image, pieces, by_block=True) as (sent, made),
    ):
        make("buffered").write(sent, tmp_path)
    assert made.found == digests
    assert ("iobench-checksums", -1) in threads


def test_the_checksum_is_of_what_is_written() -> None:
    """A tensor that changes after the copy to the block does not change the checksum."""
    first, second = np.zeros(100, np.uint8), np.ones(100, np.uint8)
    image, block = FileImage.of_parts("file", [first, second]), np.empty(4 * KIB, np.uint8)
    with recorded(image, Pieces([("a", 100), ("b", 100)]), by_block=True) as (sent, made):
        sent.gather(0, 200, block)
        first[:] = 7
    assert made.found[0] == xxhash.xxh3_64_hexdigest(bytes(100))


def test_what_fails_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write, and a checksum, also one in the thread: the checkpoint is not committed."""
    image, _, pieces, _ = _image([100 * KIB, 20])
    with pytest.raises(OSError, match="lost"), recorded(image, pieces, by_block=True):
        raise OSError("lost")

    def fail(*_: object) -> str:
        raise MemoryError

    monkeypatch.setattr("iobench.checkpoint.checksums._digests_of", fail)
    with pytest.raises(MemoryError), recorded(image, pieces, by_block=False):
        pass


_DATA = np.arange(100, dtype=np.uint8)
_PIECES = [("", 8), ("a", 50), ("empty", 0), ("b", 42)]
_RECORD = record_of(FileImage.of("file", [_DATA]), _PIECES)


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    cuts=st.lists(st.integers(0, 320), max_size=6),
    segments=st.lists(st.integers(0, 320), max_size=3),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_whatever_arrives_when(
    sizes: list[int], cuts: list[int], segments: list[int], seed: int, data: st.DataObject
) -> None:
    """Exactly the pieces that differ are named, in any order of arrival, reported or not."""
    total = sum(sizes)
    content = np.random.default_rng(seed).integers(0, 256, total, np.uint8)
    image = FileImage.of("file", [content])
    record = record_of(image, [(f"<{n}>", size) for n, size in enumerate(sizes)])
    ends = np.cumsum(sizes)
    damaged = data.draw(st.sets(st.integers(0, total - 1), max_size=3)) if total else set()
    read = content.copy()
    read[list(damaged)] ^= 1
    names = {f"<{int(np.searchsorted(ends, at, side='right'))}>" for at in damaged}
    rng = random.Random(seed)
    edges = sorted({0, total, *(cut for cut in cuts if cut < total)})
    ranges = list(itertools.pairwise(edges))
    rng.shuffle(ranges)
    inner = sorted({0, total, *(cut for cut in segments if cut < total)})
    room = np.zeros(total, dtype=np.uint8)
    into = FileImage.of("file", [room[a:b] for a, b in itertools.pairwise(inner)])
    found = ""
    try:
        with compared(into, record, "where") as incoming:
            for start, stop in ranges:
                room[start:stop] = read[start:stop]
                if rng.random() < 0.8:
                    incoming.filled(start, stop)
    except DataMismatchError as error:
        found = str(error)
    assert {name for name in (f"<{n}>" for n in range(len(sizes))) if name in found} == names
    assert bool(found) == bool(names)


@pytest.mark.parametrize(("at", "name"), [(0, "the header"), (8, "a"), (57, "a"), (58, "b")])
def test_damage_is_named(at: int, name: str) -> None:
    """The piece that differs is named."""
    data = _DATA.copy()
    data[at] ^= 4
    with (
        pytest.raises(DataMismatchError, match=rf"^w: damaged, 1 of 4 checksums differ: {name}$"),
        compared(FileImage.of("file", [data]), _RECORD, "w"),
    ):
        pass


@pytest.mark.parametrize("size", [99, 100])
def test_another_size(size: int) -> None:
    """Too few bytes, or a record whose pieces do not add up, are refused before the read."""
    record = replace(_RECORD, size_bytes=size + 1)
    with (
        pytest.raises(DataMismatchError, match=f"has {size} bytes, its manifest says {size + 1}"),
        compared(FileImage.of("file", [_DATA[:size]]), record, "w"),
    ):
        pytest.fail("read")


def test_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece is compared when its last byte is reported, and only once."""
    calls: list[int] = []
    digest = xxhash.xxh3_64_hexdigest

    def counted(data: memoryview) -> str:
        calls.append(len(data))
        return digest(data)

    monkeypatch.setattr(module.xxhash, "xxh3_64_hexdigest", counted)
    with compared(FileImage.of("file", [_DATA]), _RECORD, "w") as incoming:
        incoming.filled(60, 100)
        assert calls == []
        incoming.filled(0, 58)
        assert calls == [8, 50, 0]
        incoming.filled(58, 60)
    assert calls == [8, 50, 0]  # the last one arrived in two parts


def test_a_failed_read_or_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed read is raised as it is; a failed comparison not before the read has ended."""
    with pytest.raises(OSError, match="lost"), compared(FileImage.of("f", [_DATA]), _RECORD, "w"):
        raise OSError("lost")

    def fail(data: memoryview) -> str:
        raise MemoryError

    monkeypatch.setattr(module.xxhash, "xxh3_64_hexdigest", fail)
    with (
        pytest.raises(MemoryError),
        compared(FileImage.of("f", [_DATA]), _RECORD, "w") as incoming,
    ):
        assert incoming.filled(0, 100) is None
