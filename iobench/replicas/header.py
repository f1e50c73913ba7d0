"""SaveHeader: what a load needs, beside a rank's bytes in memory, in order to read them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import xxhash

from iobench.checkpoint.ranked.part import Part
from iobench.errors import ReplicaError
from iobench.text import parse_json

__all__ = ["SaveHeader"]


@dataclass(frozen=True, kw_only=True)
class SaveHeader:
    """The part manifest of a rank. That of rank 0 has the table of the tensors of all ranks too."""

    part: Part
    created_s: float
    table: str | None = field(default=None, repr=False)

    def to_bytes(self) -> bytes:
        """Return the header as JSON, with a checksum of it in front."""
        document = [self.part.to_json().decode(), self.created_s, self.table]
        text = json.dumps(document, separators=(",", ":")).encode()
        return xxhash.xxh3_64_digest(text) + text

    @classmethod
    def parse(cls, data: bytes, where: str) -> SaveHeader:
        """Return the header in `data`. Raises ReplicaError for damage."""
        checksum, text = data[:8], data[8:]
        if xxhash.xxh3_64_digest(text) != checksum:
            raise ReplicaError(f"{where}: the header is damaged")
        part, created_s, table = parse_json(text)
        own = xxhash.xxh3_64_hexdigest(part.encode())
        return cls(part=Part.parse(part.encode(), own, where), created_s=created_s, table=table)
