"""PieceReader: every byte is read once, and what a load keeps stays as it was compared."""

from __future__ import annotations

import random
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import xxhash

from iobench.checkpoint.load import reader
from iobench.checkpoint.load.stored import StoredPiece
from iobench.checkpoint.manifest import FileRecord
from iobench.errors import DataMismatchError
from iobench.writers.hybrid import HybridWriter
from iobench.writers.image import Bytes

_SIZE = 3_000_001


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
def test_kept_pieces_stay(tmp_path: Path, at_once: int) -> None:
    data = np.random.default_rng(1).integers(0, 256, _SIZE, dtype=np.uint8).tobytes()
    (tmp_path / "file").write_bytes(data)
    files = {"file": FileRecord(path="file", size_bytes=_SIZE, pieces=())}
    pieces = _pieces(data)
    kept: dict[StoredPiece, Bytes] = {}
    seen = []

    def deliver(piece: StoredPiece, found: Bytes) -> bool:
        seen.append(piece)
        assert found.tobytes() == data[piece.start : piece.stop]
        if len(found) > 20_000:
            kept[piece] = found
        return piece in kept

    with mock.patch.multiple(reader, _AT_ONCE=at_once, _GAP=20_000):
        direct = reader.PieceReader(HybridWriter())
        transfer = direct.read(tmp_path, files, pieces, deliver)
    assert sorted(seen) == pieces
    assert kept
    for piece, found in kept.items():
        assert found.tobytes() == data[piece.start : piece.stop], piece
    assert transfer.bytes <= _SIZE


def test_damage_is_found(tmp_path: Path) -> None:
    data = bytes(_SIZE)
    pieces = _pieces(data)
    (tmp_path / "file").write_bytes(data[:-1] + b"\1")
    files = {"file": FileRecord(path="file", size_bytes=_SIZE, pieces=())}
    with pytest.raises(DataMismatchError, match=f"checksum of piece {pieces[-1].start}"):
        reader.PieceReader(HybridWriter()).read(tmp_path, files, pieces, lambda *_: False)
