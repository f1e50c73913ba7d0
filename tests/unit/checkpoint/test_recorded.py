"""Checksums that are computed while a file is written, some of them in the writer's blocks."""

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

from iobench.checkpoint import checksums as module
from iobench.checkpoint.checksums import PieceDigests, recorded
from iobench.checkpoint.manifest import Pieces
from iobench.formats.many_parts import PartsImage
from iobench.units import KIB
from iobench.writers.registry import make


def _image(sizes: list[int]) -> tuple[PartsImage, bytes, Pieces, list[str]]:
    """Return an image of parts of these sizes, its bytes, its pieces and their checksums."""
    data = np.random.default_rng(len(sizes)).integers(0, 256, sum(sizes), np.uint8)
    ends = [0, *itertools.accumulate(sizes)]
    parts = [data[begin:end].copy() for begin, end in itertools.pairwise(ends)]
    digests = [xxhash.xxh3_64_hexdigest(part) for part in parts]
    pieces = [(str(number), size) for number, size in enumerate(sizes)]
    return PartsImage("file", parts), data.tobytes(), Pieces(pieces), digests


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
        recorded(image, pieces, by_block=True) as recording,
    ):
        for start, stop in ranges:
            if rng.random() < 0.8:
                block = np.zeros(500, np.uint8)
                assert recording.image.gather(start, stop, block) == stop - start
                assert block[: stop - start].tobytes() == data[start:stop]
    assert recording.digests.found == digests
    assert [piece.xxh3_64 for piece in recording.record.pieces] == digests
    assert recording.record.size_bytes == len(data)


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
        recorded(image, pieces, by_block=writer.direct) as recording,
    ):
        writer.write(recording.image, tmp_path)
    assert (tmp_path / "file").read_bytes() == data
    assert recording.digests.found == digests
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
        recorded(image, pieces, by_block=True) as recording,
    ):
        make("buffered").write(recording.image, tmp_path)
    assert recording.digests.found == digests
    assert ("iobench-checksums", -1) in threads


def test_the_checksum_is_of_what_is_written() -> None:
    """A tensor that changes after the copy to the block does not change the checksum."""
    first, second = np.zeros(100, np.uint8), np.ones(100, np.uint8)
    image, block = PartsImage("file", [first, second]), np.empty(4 * KIB, np.uint8)
    with recorded(image, Pieces([("a", 100), ("b", 100)]), by_block=True) as recording:
        recording.image.gather(0, 200, block)
        first[:] = 7
    assert recording.digests.found[0] == xxhash.xxh3_64_hexdigest(bytes(100))


def test_a_failed_write_is_raised() -> None:
    image, _, pieces, _ = _image([10, 20])
    with pytest.raises(OSError, match="lost"), recorded(image, pieces, by_block=True):
        raise OSError("lost")


def test_a_failed_checksum_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one in the thread: the checkpoint is not committed."""
    image, _, pieces, _ = _image([100 * KIB, 20])

    def fail(*_: object) -> str:
        raise MemoryError

    monkeypatch.setattr("iobench.checkpoint.checksums._digests_of", fail)
    with pytest.raises(MemoryError), recorded(image, pieces, by_block=False):
        pass
