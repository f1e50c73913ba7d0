"""S3 checksums: awscrt computes them, and combines those of parts without reading the bytes."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from iobench.errors import UnavailableError
from iobench.writers.image import Bytes

_WIDTHS = {"crc64nvme": 8, "crc32c": 4}
ALGORITHMS = (*_WIDTHS, "none")


@dataclass(frozen=True, kw_only=True)
class Checksum:
    """A full-object checksum algorithm of S3. boto3 uses its `name` in capitals."""

    name: str

    @classmethod
    def named(cls, name: str) -> Checksum | None:
        """Return the checksum called `name`, or None for `none`.

        Raises UnavailableError if awscrt is missing or too old.
        """
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
        """Return the checksum and its value from a HeadObject answer, or None if it has neither.

        A COMPOSITE value (a checksum of the parts' checksums) is ignored: the object's bytes alone
        cannot reproduce it.
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
        """The name in boto3's spelling: `CRC64NVME`."""
        return self.name.upper()

    @property
    def field(self) -> str:
        """The key of the value in requests and answers: `ChecksumCRC64NVME`."""
        return f"Checksum{self.algorithm}"

    def update(self, piece: Bytes | memoryview, value: int = 0) -> int:
        """Return the checksum after appending `piece` to bytes whose checksum is `value`."""
        from awscrt import checksums

        found: int = getattr(checksums, self.name)(piece, value)
        return found

    def of(self, views: Iterable[Bytes]) -> int:
        """Return the checksum of the concatenated views."""
        value = 0
        for view in views:
            value = self.update(view, value)
        return value

    def combined(self, parts: Iterable[tuple[int, int]]) -> int:
        """Return the checksum of the whole object from (checksum, size in bytes) of each part.

        The parts must be in order.
        """
        from awscrt import checksums

        combine = getattr(checksums, f"combine_{self.name}")
        value = 0
        for part, size_bytes in parts:
            value = combine(value, part, size_bytes)
        return value

    def composite(self, parts: Sequence[int]) -> str:
        """Return the checksum of the parts' checksums, which older stores return.

        The format is base64, a dash and the number of parts.
        """
        width = _WIDTHS[self.name]
        joined = b"".join(part.to_bytes(width, "big") for part in parts)
        return f"{self.text(self.update(memoryview(joined)))}-{len(parts)}"

    def text(self, value: int) -> str:
        """Return `value` in S3's notation: base64 of the big-endian bytes."""
        return base64.b64encode(value.to_bytes(_WIDTHS[self.name], "big")).decode()
