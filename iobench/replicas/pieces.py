"""Pieces: the unit in which replicas are moved and checked. Each has an XXH3-64."""

from __future__ import annotations

import xxhash

from iobench.units import MIB
from iobench.writers.image import Bytes

__all__ = ["DIGEST", "PIECE", "count_of", "digest_at", "digest_of", "pieces_of", "span_of"]

PIECE = MIB
"""Bytes of a piece. XXH3 holds Python's lock: 1 MiB is 0.1 ms."""
DIGEST = 8
"""Bytes of a digest, big-endian."""


def count_of(size_bytes: int) -> int:
    """Return the number of pieces; the last one may be shorter."""
    return -(-size_bytes // PIECE)


def span_of(number: int, size_bytes: int) -> tuple[int, int]:
    """Return the begin and the end of a piece of `size_bytes`."""
    return number * PIECE, min((number + 1) * PIECE, size_bytes)


def pieces_of(start: int, stop: int) -> tuple[int, int]:
    """Return the first piece of the bytes [start, stop), and the number after the last."""
    return start // PIECE, -(-stop // PIECE) if stop > start else start // PIECE


def digest_of(piece: Bytes) -> bytes:
    """Return the digest of one piece."""
    return xxhash.xxh3_64_digest(piece.data)


def digest_at(digests: bytes, number: int) -> bytes:
    """Return the digest of the piece `number`."""
    return digests[number * DIGEST : (number + 1) * DIGEST]
