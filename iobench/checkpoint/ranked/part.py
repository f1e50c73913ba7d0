"""Part: what one rank wrote of a checkpoint. Rank 0 reads the parts of all ranks and commits."""

from __future__ import annotations

from typing import Any

import msgspec
import xxhash

from iobench.checkpoint.manifest import FileRecord
from iobench.errors import DataMismatchError

__all__ = ["Part", "part_file"]


def part_file(rank: int) -> str:
    """Return the name of a rank's part manifest."""
    return f"part-{rank}.json"


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file of one rank with the checksums of its pieces: the tensors, then the `values`.

    Those are the paths of plain values in the state. `skeleton` is that of this rank; None if it is
    that of rank 0, except for `own`, this rank's values of each PerRank.
    """

    rank: int
    host: str
    file: FileRecord
    values: tuple[tuple[str | int, ...], ...]
    skeleton: Any
    own: list[Any]

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def parse(cls, text: bytes, checksum: str, where: str) -> Part:
        """Return the part in `text`. Raises DataMismatchError unless its XXH3-64 is `checksum`."""
        if xxhash.xxh3_64_hexdigest(text) != checksum:
            raise DataMismatchError(f"{where}: differs from what its rank wrote")
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise DataMismatchError(f"{where}: not the part of a checkpoint ({error})") from error
