"""PieceReader: every byte is read once, and what a load keeps stays as it was compared."""

from __future__ import annotations

import random
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import xxhash

from iobench.checkpoint import piece_reader as reader
from iobench.checkpoint.manifest import FileRecord
from iobench.checkpoint.piece_reader import StoredPiece
from iobench.errors import DataMismatchError
from iobench.formats import tensor_slices
from iobench.writers.base import StoredReader
from iobench.writers.blocks.pages import pages_to_read_into
from iobench.writers.hybrid import HybridWriter
from iobench.writers.image import Bytes, FileImage

_SIZE = 3_000_001


_FILES = {"file": FileRecord(path="file", size_bytes=_SIZE, pieces=())}


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    """Random bytes, which are those of a file too."""
    made = np.random.default_rng(1).integers(0, 256, _SIZE, dtype=np.uint8).tobytes()
    (tmp_path / "file").write_bytes(made)
    return made


def _pieces(data: bytes) -> list[StoredPiece]:
    """Return pieces of odd sizes, with gaps between some of them."""
    cuts = random.Random(2)
    pieces, start = [], 0
    while start < len(data):
        stop = min(len(data), start + cuts.choice([1, 700, 40_000, 300_000]) + cuts.randrange(99))
        digest = xxhash.xxh3_64_hexdigest(data[start:stop])
        pieces.append(StoredPiece("file", start, stop, digest, f"piece {start}"))
        start = stop + cuts.choice([0, 0, 0, 60_000])
    return pieces


@pytest.mark.parametrize("at_once", [8192, 100_000, 1 << 30])
def test_kept_pieces_stay(tmp_path: Path, data: bytes, at_once: int) -> None:
    pieces = _pieces(data)
    kept: dict[StoredPiece, Bytes] = {}
    seen = []

    def deliver(piece: StoredPiece, found: Bytes) -> bool:
        seen.append(piece)
        assert found.tobytes() == data[piece.start : piece.stop]
        if len(found) > 20_000:
            kept[piece] = found
        return piece in kept

    with mock.patch.multiple(reader, AT_ONCE=at_once, GAP_BYTES=20_000):
        direct = reader.PieceReader()
        transfer = direct.read(StoredReader(HybridWriter(), tmp_path), _FILES, pieces, deliver)
    assert sorted(seen) == pieces
    assert kept
    for piece, found in kept.items():
        assert found.tobytes() == data[piece.start : piece.stop], piece
    assert transfer.bytes <= _SIZE


def test_no_more_memory_than_a_window(tmp_path: Path, data: bytes) -> None:
    """Of a large file only what is read has memory, not even addresses for all of it."""
    pieces = _pieces(data)
    sizes: list[int] = []

    def pages(size: int) -> Bytes:
        sizes.append(size)
        return pages_to_read_into(size)

    with (
        mock.patch.multiple(reader, AT_ONCE=100_000, GAP_BYTES=20_000),
        mock.patch.multiple(tensor_slices, GAP_BYTES=20_000, pages_to_read_into=pages),
    ):
        copy = StoredReader(HybridWriter(), tmp_path)
        reader.PieceReader().read(copy, _FILES, pieces, lambda *_: False)
    assert sizes
    assert max(sizes) < 4096 + max(100_000, *(piece.stop - piece.start for piece in pieces))


class _Chain(StoredReader):
    """Further copies of the files; each call of `read_again` reads the next one."""

    def __init__(self, *places: Path) -> None:
        first, *others = places
        super().__init__(HybridWriter(), first)
        self._others = [StoredReader(HybridWriter(), other) for other in others]

    def read_again(self, image: FileImage, start: int, stop: int, piece: str) -> bool:
        if not self._others:
            return False
        self._others.pop(0).read(image, [(start, stop)])
        return True


@pytest.mark.parametrize("right", [1, 2, 3])
def test_each_copy_is_tried(tmp_path: Path, data: bytes, right: int) -> None:
    """A piece that is damaged in some copies comes from the next one; in all, it is an error."""
    piece = StoredPiece("file", 5, _SIZE, xxhash.xxh3_64_hexdigest(data[5:]), "w")
    places = [tmp_path / name for name in "abc"]
    for number, place in enumerate(places):
        place.mkdir()
        (place / "file").write_bytes(data if number == right else data[:-1] + bytes([data[-1] ^ 1]))
    found: list[bytes] = []

    def deliver(_: StoredPiece, read: Bytes) -> bool:
        found.append(read.tobytes())
        return False

    if right < len(places):
        reader.PieceReader().read(_Chain(*places), _FILES, [piece], deliver)
        assert found == [data[5:]]
    else:
        with pytest.raises(DataMismatchError, match="checksum of w differs"):
            reader.PieceReader().read(_Chain(*places), _FILES, [piece], deliver)
