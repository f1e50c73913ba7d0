"""S3Proof: checks that the key holds the bytes that were sent. It removes nothing.

A broken proxy may answer in place of the store. An answer proves a save only if it has an ETag.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from iobench.errors import TransferError
from iobench.writers.s3_store.checksum import Checksum
from iobench.writers.s3_store.client import S3Client
from iobench.writers.s3_store.errors import require_fields
from iobench.writers.s3_store.target import S3Target
from iobench.writers.transfer import Meter

__all__ = ["S3Proof", "SentObject"]


@dataclass(frozen=True, kw_only=True)
class SentObject:
    """An object as it was sent.

    `checksums` are the values that a store may return for it: that of the whole object, or that of
    the parts' checksums. `etag` is the ETag that stores compute from MD5s; empty if unknown.
    """

    size_bytes: int
    checksum: Checksum | None
    checksums: tuple[str, ...] = ()
    etag: str = ""

    def is_in(self, found: Mapping[str, Any]) -> bool:
        """Return whether the HeadObject answer `found` proves that the key holds these bytes."""
        if found.get("ContentLength") != self.size_bytes:
            return False
        if self.checksum is not None and found.get(self.checksum.field) in self.checksums:
            return True
        return bool(self.etag) and str(found.get("ETag")).strip('"') == self.etag


class S3Proof:
    """Compares the object that the store holds under `target` with the object that was sent."""

    def __init__(self, client: S3Client, target: S3Target) -> None:
        self._client, self._target = client, target
        self._where = {"Bucket": target.bucket, "Key": target.key}

    def head(self, s3: Any) -> Any:
        """Return the answer to HeadObject, with the checksum if the store keeps one."""
        return require_fields(s3.head_object(**self._where, ChecksumMode="ENABLED"), "ETag")

    def check(self, answer: Mapping[str, Any], sent: SentObject, meter: Meter) -> None:
        """Compare the checksum that the store returns, in `answer` or else by HeadObject.

        Raises TransferError if the key holds other bytes. If HeadObject fails or is interrupted,
        the error says that the object is complete. A store that returns no checksum at all is a
        fallback.
        """
        if sent.checksum is None:
            return
        found, field = answer, sent.checksum.field
        if found.get(field) is None:
            try:
                found = self._client.call(
                    self.head, meter, doing="checking what was stored", where=self._target
                )
            except BaseException as error:
                self._report(
                    error,
                    f"the server has answered that the object is complete, with the ETag "
                    f"{answer['ETag']}, so it was left there; only its {sent.checksum.name} could "
                    "not be compared",
                )
                raise
        value, stored = found.get(field), found.get("ContentLength", sent.size_bytes)
        if stored == sent.size_bytes and value in sent.checksums:
            return
        if stored == sent.size_bytes and value is None:
            meter.fell_back(
                f"{sent.checksum.name} compared after completion",
                "the ETag of the answer",
                "the server returns no checksum of what it stored",
            )
            return
        raise TransferError(
            f"{self._target}: the server stored something else ({stored} bytes with "
            f"{sent.checksum.name} {value}, not {sent.size_bytes} with {sent.checksums[0]}), which "
            "was left there"
        )

    def _report(self, error: BaseException, text: str) -> None:
        """Raise a TransferError again with this text too; add a note to another error."""
        if isinstance(error, TransferError):
            more = f"{error.strerror}; {text}"
            raise TransferError(error.errno, more, error.filename) from error
        error.add_note(f"{self._target}: {text}")
