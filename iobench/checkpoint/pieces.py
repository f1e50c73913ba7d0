"""Pieces: names and sizes of the pieces of a file, each with a checksum of its own."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as quoted

__all__ = ["Pieces", "quoted"]


class Pieces:
    """Consecutive pieces of a file, usually one tensor each. The next save may use it too."""

    def __init__(self, pieces: Sequence[tuple[str, int]]) -> None:
        """`pieces` are (name, bytes); they follow one another without gaps."""
        self.names = [name for name, _ in pieces]
        self.sizes = [size for _, size in pieces]
        self.ends = list(itertools.accumulate(self.sizes))
        self.begins = [0, *self.ends[:-1]]
        self.largest_bytes = max(self.sizes, default=0)

    def __len__(self) -> int:
        return len(self.sizes)

    def json(self, checksums: Sequence[str]) -> bytes:
        """Return the pieces as JSON for a manifest, with their `checksums` in order.

        A checksum is ASCII without a quotation mark or a backslash.
        """
        parts = [""] * (2 * len(checksums) + 1)
        parts[::2], parts[1::2] = self._texts, checksums
        return "".join(parts).encode("ascii")

    @functools.cached_property
    def _texts(self) -> list[str]:
        """The JSON around the checksums."""
        texts = [
            f'"}},{{"name":{quoted(name)},"size_bytes":{size},"xxh3_64":"'
            for name, size in zip(self.names, self.sizes, strict=True)
        ]
        if not texts:
            return ["[]"]
        return ["[" + texts[0].removeprefix('"},'), *texts[1:], '"}]']
