"""S3Upload: one object on its way up, in one piece or in parts; visible only once published."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from typing import Any

from iobench.errors import IobenchError, TransferError
from iobench.writers.image import Bytes
from iobench.writers.s3_checksum import Checksum
from iobench.writers.s3_client import S3Client
from iobench.writers.s3_errors import CorruptedError, code_of, status_of
from iobench.writers.s3_parts import PartBody, SentPart, etag_of
from iobench.writers.s3_target import S3Target
from iobench.writers.transfer import Meter

__all__ = ["PART_UPLOAD", "PUT", "S3Upload"]

PART_UPLOAD, PUT = "part upload", "put"
_NOT_KNOWN = {"NotImplemented", "InvalidRequest", "InvalidArgument", "XNotImplemented"}
_ABORT_ATTEMPTS = 4
_unfinished: dict[str, S3Client] = {}
"""Clients with an upload to abort. Garbage that the collector takes apart with its stream, a client
could not do that any more."""


class S3Upload:
    """The object `target` until it is complete: `put` for a small one, else parts, then `complete`.

    `abort` takes back what was not completed. Parts may be sent from many threads at once, and one
    number again, which replaces what it was.
    """

    def __init__(self, client: S3Client, target: S3Target, checksum: Checksum | None) -> None:
        self._client, self._target, self._checksum = client, target, checksum
        self._where = {"Bucket": target.bucket, "Key": target.key}
        self._id: str | None = None
        self._parts: dict[int, SentPart] = {}
        self._tells = False
        """Whether the server told a checksum of a part; one that does not is not asked for more."""
        self.stop = threading.Event()
        """Set when the upload is given up: nobody waits for another attempt then."""

    @property
    def begun(self) -> bool:
        """Whether the server knows of a multipart upload."""
        return self._id is not None

    def put(self, views: Sequence[Bytes], meter: Meter) -> None:
        """Send the whole object in one request; durable and visible on return.

        What an attempt stored of other bytes is visible too: another replaces it, or it is removed.
        """
        value = self._checksum_of(views, meter)
        size = sum(map(len, views))
        damaged = False

        def attempt(s3: Any, known: dict[str, str]) -> Any:
            nonlocal damaged
            answer = s3.put_object(**self._where, Body=PartBody(views), **known)
            damaged = any(answer.get(name, sent) != sent for name, sent in known.items())
            return self._checked(answer, value)

        with meter.phase("upload"):
            try:
                answer, used = self._with_checksum(attempt, self._field(value), meter)
            except BaseException as error:
                if damaged:
                    self._take_back(error, "the server stored something else")
                raise
        meter.count(PUT, size)
        if used:
            assert self._checksum is not None
            self._compare(answer, [self._checksum.text(value)], size, meter)

    def begin(self, meter: Meter) -> None:
        """Begin a multipart upload."""
        wanted = (
            {"ChecksumAlgorithm": self._checksum.algorithm, "ChecksumType": "FULL_OBJECT"}
            if self._checksum
            else {}
        )
        with meter.phase("open"):
            answer, used = self._with_checksum(
                lambda s3, known: s3.create_multipart_upload(**self._where, **known), wanted, meter
            )
        self._id = answer["UploadId"]
        _unfinished[self._id] = self._client
        if not used:
            self._checksum = None

    def send(self, number: int, views: Sequence[Bytes], meter: Meter) -> None:
        """Send part `number` (from 1); the bytes are views of memory that stays as it is."""
        value = self._checksum_of(views, meter)
        size = sum(map(len, views))
        with meter.phase("upload"):
            answer = self._call(
                lambda s3: self._checked(
                    s3.upload_part(
                        **self._where,
                        UploadId=self._id,
                        PartNumber=number,
                        Body=PartBody(views),
                        **self._field(value),
                    ),
                    value,
                ),
                f"uploading part {number}",
                meter,
            )
        meter.count(PART_UPLOAD, size)
        self._parts[number] = SentPart(etag=answer["ETag"], size_bytes=size, checksum=value)

    def complete(self, meter: Meter) -> None:
        """Publish the object: durable and visible on return, its checksum compared.

        An object that is not what was sent, or about which the server is silent, is removed.
        """
        parts = [self._parts[number] for number in sorted(self._parts)]
        size = sum(part.size_bytes for part in parts)
        request: dict[str, Any] = {
            "MultipartUpload": {
                "Parts": [
                    {"PartNumber": number, "ETag": part.etag, **self._field(part.checksum)}
                    for number, part in sorted(self._parts.items())
                ]
            }
        }
        whole, composite = "", []
        if self._checksum:
            value = self._checksum.combined((part.checksum, part.size_bytes) for part in parts)
            request |= {"ChecksumType": "FULL_OBJECT", **self._field(value)}
            whole = self._checksum.text(value)
            composite = [self._checksum.composite([part.checksum for part in parts])]
        with meter.phase("commit"):
            answer = self._call(
                lambda s3: self._complete(s3, request, parts), "completing the upload", meter
            )
            self._forget()
            self._compare(answer, [whole, *composite], size, meter)

    def abort(self) -> None:
        """Take back what was sent in parts. Never raises: what stays behind is told in a warning.

        Call it when no part is on its way any more.
        """
        upload = self._id
        self.stop.set()
        if upload is None:
            return
        try:
            self._client.call(
                lambda s3: s3.abort_multipart_upload(**self._where, UploadId=upload),
                Meter(),
                doing="aborting the upload",
                where=self._target,
                attempts=_ABORT_ATTEMPTS,
            )
        except Exception as error:  # noqa: BLE001 -- must not hide why the upload was given up
            if code_of(error.__cause__ or error) == "NoSuchUpload":
                return
            left = (
                f"{self._target}: its multipart upload could not be aborted ({error}); type: "
                f"iobench s3 abort-uploads {self._target}"
            )
            if error.__context__ is not None and error.__context__.__context__ is not None:
                error.__context__.__context__.add_note(left)
            warnings.warn(left, ResourceWarning, stacklevel=2)

        finally:
            self._forget()

    # Inside.

    def _forget(self) -> None:
        if self._id is not None:
            _unfinished.pop(self._id, None)
        self._id = None

    def _call(self, request: Any, doing: str, meter: Meter) -> Any:
        return self._client.call(request, meter, doing=doing, where=self._target, stop=self.stop)

    def _field(self, value: int) -> dict[str, str]:
        return {self._checksum.field: self._checksum.text(value)} if self._checksum else {}

    def _checksum_of(self, views: Sequence[Bytes], meter: Meter) -> int:
        if self._checksum is None:
            return 0
        with meter.phase("checksum"):
            return self._checksum.of(views)

    def _with_checksum(self, request: Any, known: dict[str, str], meter: Meter) -> tuple[Any, bool]:
        """The answer, and whether the server took the checksum; asked without it if it did not."""
        doing = "uploading"
        try:
            return self._call(lambda s3: request(s3, known), doing, meter), bool(known)
        except IobenchError as error:
            cause = error.__cause__
            refused = cause is not None and (
                code_of(cause) in _NOT_KNOWN or status_of(cause) == 501
            )
            if not known or not refused:
                raise
            answer = self._call(lambda s3: request(s3, {}), doing, meter)
            assert self._checksum is not None
            reason = f"the server refuses it ({code_of(cause) or 501})" if cause else ""
            meter.fell_back(f"{self._checksum.name} checksum", "none", reason)
            return answer, False

    def _checked(self, answer: Any, value: int) -> Any:
        """`answer`, where the server's checksum, if it tells one, is ours."""
        if self._checksum is not None:
            told = answer.get(self._checksum.field)
            self._tells = self._tells or told is not None
            if told is not None and told != self._checksum.text(value):
                raise CorruptedError(
                    f"the server received other bytes: {self._checksum.name} is {told}, "
                    f"{self._checksum.text(value)} was sent"
                )
        if not answer.get("ETag"):
            raise CorruptedError("the server's answer has no ETag")
        return answer

    def _complete(self, s3: Any, request: dict[str, Any], parts: Sequence[SentPart]) -> Any:
        try:
            return s3.complete_multipart_upload(**self._where, UploadId=self._id, **request)
        except Exception as error:
            if code_of(error) == "NoSuchUpload":  # an earlier attempt, whose answer was lost?
                found = s3.head_object(**self._where, ChecksumMode="ENABLED")
                if found["ETag"].strip('"') == etag_of(parts):
                    return found
            raise

    def _compare(self, answer: Any, wanted: list[str], size_bytes: int, meter: Meter) -> None:
        """Compare what the server says it stored; it is removed again if it is something else.

        So it is if the server does not answer: a write that fails has published nothing.
        """
        if self._checksum is None:
            return
        told, stored = answer.get(self._checksum.field), size_bytes
        if told is None and self._tells:
            try:
                found = self._call(
                    lambda s3: s3.head_object(**self._where, ChecksumMode="ENABLED"),
                    "checking what was stored",
                    meter,
                )
            except BaseException as error:
                self._take_back(error, "the server could not be asked what it stored")
                raise
            told, stored = found.get(self._checksum.field), found["ContentLength"]
        if told is None:
            meter.fell_back(
                f"{self._checksum.name} compared after completion",
                "nothing",
                "the server tells no checksum of what it stored",
            )
        if stored != size_bytes or (told is not None and told not in wanted):
            raise TransferError(
                f"{self._target}: the server stored something else ({stored} bytes with "
                f"{self._checksum.name} {told}, not {size_bytes} with {wanted[0]}); "
                f"{self._removed()}"
            )

    def _take_back(self, error: BaseException, why: str) -> None:
        """Remove the object for `error`, which tells of it: another TransferError, else a note."""
        fate = self._removed()
        if isinstance(error, TransferError):
            text = f"{error.strerror}; {fate}"
            raise TransferError(error.errno, text, error.filename) from error
        error.add_note(f"{self._target}: {why}; {fate}")

    def _removed(self) -> str:
        """Remove the object, perhaps not what was sent; in words, what became of it."""
        try:
            self._client.call(
                lambda s3: s3.delete_object(**self._where),
                Meter(),
                doing="removing it",
                where=self._target,
                attempts=_ABORT_ATTEMPTS,
            )
        except Exception as error:  # noqa: BLE001 -- must not hide why it is removed
            return f"it could not be removed and is still there ({error})"
        return "it was removed"
