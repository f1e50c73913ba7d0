"""Part: what one rank wrote of a checkpoint. Rank 0 reads the parts of all ranks and commits."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import xxhash

from iobench.checkpoint.manifest import FileRecord, Piece
from iobench.checkpoint.tree_spec import json_text
from iobench.errors import DataMismatchError

__all__ = ["Part", "part_file"]


def part_file(rank: int) -> str:
    """Return the name of a rank's part manifest."""
    return f"part-{rank}.json"


@dataclass(frozen=True, kw_only=True)
class Part:
    """The file of one rank with the checksums of its pieces: the tensors, then the `values`, which
    are the paths of plain values in the state.

    `attempt` is that of the save, so that the parts of an earlier start are not taken for its own.
    `skeleton` is that of this rank; None if it is that of rank 0, except for `own`, this rank's
    values of each PerRank.
    """

    attempt: str
    rank: int
    host: str
    file: FileRecord
    values: tuple[tuple[str | int, ...], ...]
    skeleton: Any = field(repr=False)
    own: list[Any] = field(repr=False)

    def to_json(self) -> str:
        document = {
            "attempt": self.attempt,
            "rank": self.rank,
            "host": self.host,
            "path": self.file.path,
            "size_bytes": self.file.size_bytes,
            "pieces": self.file.pieces,
            "values": self.values,
            "skeleton": self.skeleton,
            "own": self.own,
        }
        return json_text(document)

    @classmethod
    def parse(cls, text: bytes, checksum: str, where: str) -> Part:
        """Return the part in `text`. Raises DataMismatchError for another checksum."""
        if xxhash.xxh3_64_hexdigest(text) != checksum:
            raise DataMismatchError(f"{where}: not what its rank wrote")
        found = json.loads(text)
        return cls(
            attempt=found["attempt"],
            rank=found["rank"],
            host=found["host"],
            file=FileRecord(
                path=found["path"],
                size_bytes=found["size_bytes"],
                pieces=tuple(Piece(*piece) for piece in found["pieces"]),
            ),
            values=tuple(map(tuple, found["values"])),
            skeleton=found["skeleton"],
            own=found["own"],
        )
