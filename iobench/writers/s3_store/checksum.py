"""Checksums of S3: computed by awscrt at the speed of memory, combined without the bytes."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from iobench.errors import UnavailableError
from iobench.writers.image import Bytes

__all__ = ["ALGORITHMS", "Checksum"]

_WIDTHS = {"crc64nvme": 8, "crc32c": 4}
ALGORITHMS = (*_WIDTHS, "none")


@dataclass(frozen=True, kw_only=True)
class Checksum:
    """One of S3's full-object checksums. `name` is also what boto3 calls it, in capitals."""

    name: str

    @classmethod
    def named(cls, name: str) -> Checksum | None:
        """The checksum of that name; None for `none`. Raises UnavailableError without awscrt."""
        if name == "none":
            return None
        try:
            from awscrt import checksums
        except ImportError as error:
            raise UnavailableError(
                "s3",
                f"checksum={name} needs awscrt, which is not installed.",
                "Type: pip install 'iobench[s3]', or use checksum=none.",
            ) from error
        if not hasattr(checksums, f"combine_{name}"):
            raise UnavailableError(
                "s3", "this awscrt cannot combine checksums.", "Type: pip install -U 'boto3[crt]'."
            )
        return cls(name=name)

    @classmethod
    def of_object(cls, answer: Mapping[str, Any]) -> tuple[Checksum, str] | None:
        """The checksum that an answer to HeadObject carries, and its value; None for none.

        A checksum of checksums (COMPOSITE) is none: it cannot be had from the object's bytes.
        """
        for name in _WIDTHS:
            value = answer.get(f"Checksum{name.upper()}")
            whole = answer.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT"
            if value and whole and "-" not in value:
                checksum = cls.named(name)
                assert checksum is not None
                return checksum, value
        return None

    @property
    def algorithm(self) -> str:
        """As boto3 wants it: `CRC64NVME`."""
        return self.name.upper()

    @property
    def field(self) -> str:
        """The parameter and the key of answers that hold a value: `ChecksumCRC64NVME`."""
        return f"Checksum{self.algorithm}"

    def update(self, piece: Bytes | memoryview, value: int = 0) -> int:
        """The checksum of what gave `value` and then `piece`."""
        from awscrt import checksums

        found: int = getattr(checksums, self.name)(piece, value)
        return found

    def of(self, views: Iterable[Bytes]) -> int:
        """The checksum of the views one after another."""
        value = 0
        for view in views:
            value = self.update(view, value)
        return value

    def combined(self, parts: Iterable[tuple[int, int]]) -> int:
        """The checksum of the whole from (checksum, bytes) of its parts in order."""
        from awscrt import checksums

        combine = getattr(checksums, f"combine_{self.name}")
        value = 0
        for part, size_bytes in parts:
            value = combine(value, part, size_bytes)
        return value

    def composite(self, parts: Sequence[int]) -> str:
        """The checksum of the parts' checksums, as older stores tell it: base64, dash, count."""
        width = _WIDTHS[self.name]
        joined = b"".join(part.to_bytes(width, "big") for part in parts)
        return f"{self.text(self.update(memoryview(joined)))}-{len(parts)}"

    def text(self, value: int) -> str:
        """As S3 writes it: base64 of the big-endian bytes."""
        return base64.b64encode(value.to_bytes(_WIDTHS[self.name], "big")).decode()
