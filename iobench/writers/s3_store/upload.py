"""S3Upload: uploads one object, whole or in parts. It is visible only once it is complete."""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from iobench.errors import IobenchError, TransferError
from iobench.writers.image import Bytes
from iobench.writers.s3_store.client import S3Client
from iobench.writers.s3_store.errors import (
    CorruptedError,
    code_of,
    is_transient,
    require_fields,
    status_of,
)
from iobench.writers.s3_store.objects import S3Objects, UnfinishedUpload, abort_upload
from iobench.writers.s3_store.parts import Checksum, PartBody, SentPart, etag_of
from iobench.writers.s3_store.target import S3Target
from iobench.writers.transfer import Meter

PART_UPLOAD, PUT = "part upload", "put"
_REFUSED = {"NotImplemented", "InvalidRequest", "InvalidArgument", "XNotImplemented"}
_ABORT_ATTEMPTS = 4
_unfinished: dict[str, S3Client] = {}
"""Clients with an upload to abort, by upload ID.

The reference keeps a client alive while its stream is garbage. Otherwise the collector might clear
the client before the stream, and the stream could not abort its upload."""


class S3Upload:
    """One upload to `target`: `put` for a small object; else `begin`, `send` parts and `complete`.

    `abort` discards an upload that is not complete. Many threads may send parts at once. Sending a
    part number again replaces that part.
    """

    def __init__(self, client: S3Client, target: S3Target, checksum: Checksum | None) -> None:
        self._client, self._target, self._checksum = client, target, checksum
        self._where = {"Bucket": target.bucket, "Key": target.key}
        self._id: str | None = None
        self._parts: dict[int, SentPart] = {}
        self.stop = threading.Event()
        """Set when no more parts are to be sent. It ends the waits between attempts."""

    @property
    def begun(self) -> bool:
        """Whether the multipart upload exists on the server."""
        return self._id is not None

    def put(self, views: Sequence[Bytes], meter: Meter) -> None:
        """Send the whole object in one request. It is durable and visible on return.

        An attempt that stores damaged bytes makes them visible. The next attempt replaces them.
        """
        value = self._checksum_of(views, meter)
        size = sum(map(len, views))

        def attempt(s3: Any, known: dict[str, str]) -> Any:
            return self._checked(s3.put_object(**self._where, Body=PartBody(views), **known), value)

        with meter.operation("upload"):
            answer = self._with_checksum(attempt, self._field(value), meter)
            self._verify(answer, size, self._field(value), meter)
        meter.count(PUT, size)

    def begin(self, meter: Meter) -> None:
        """Begin a multipart upload."""
        wanted = (
            {"ChecksumAlgorithm": self._checksum.algorithm, "ChecksumType": "FULL_OBJECT"}
            if self._checksum
            else {}
        )
        with meter.phase("open"):
            answer = self._with_checksum(self._create, wanted, meter)
        self._adopt(answer["UploadId"])

    def send(self, number: int, views: Sequence[Bytes], meter: Meter) -> None:
        """Send part `number`, counted from 1. The memory of `views` must not change during it."""
        value = self._checksum_of(views, meter)
        size = sum(map(len, views))
        with meter.operation("upload"):
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
                self.stop,
            )
        meter.count(PART_UPLOAD, size)
        self._parts[number] = SentPart(etag=answer["ETag"], size_bytes=size, checksum=value)

    def complete(self, meter: Meter) -> None:
        """Publish the object. On return it is durable and visible, and its checksum is compared.

        An answer without an ETag is a lost answer. See `_verify` for other bytes. The
        upload can be aborted until there is proof.
        """
        parts = [part for _, part in sorted(self._parts.items())]
        described = [
            {"PartNumber": number, "ETag": part.etag, **self._field(part.checksum)}
            for number, part in sorted(self._parts.items())
        ]
        request: dict[str, Any] = {"MultipartUpload": {"Parts": described}}
        size, whole = sum(part.size_bytes for part in parts), dict[str, str]()
        if self._checksum:
            known = ((part.checksum, part.size_bytes) for part in parts)
            whole = self._field(self._checksum.combined(known))
            request |= {"ChecksumType": "FULL_OBJECT", **whole}
        with meter.phase("commit"):
            try:
                answer = self._call(
                    lambda s3: require_fields(
                        s3.complete_multipart_upload(**self._where, UploadId=self._id, **request),
                        "ETag",
                    ),
                    "completing the upload",
                    meter,
                )
            except TransferError as error:
                answer = self._completed_unanswered(error, size, whole, meter)
            self._verify(answer, size, whole, meter)
        self._forget()

    def fail(self) -> None:
        """End after an error: `leave` inside `TimeLimit.within`, else `abort`. Never raises."""
        if self._client.time_limit.leaves_failed:
            self.leave()
        else:
            self.abort()

    def leave(self) -> None:
        """End without an abort: a later ResumedUpload to the key goes on."""
        self.stop.set()
        self._forget()

    def abort(self) -> None:
        """Discard the parts that were sent. Never raises: a warning names what is left behind.

        Call it when no part is in flight any more.
        """
        upload = self._id
        self.stop.set()
        if upload is None:
            return
        try:
            abort_upload(self._client, self._target, upload, _ABORT_ATTEMPTS)
        except Exception as error:  # noqa: BLE001 -- must not hide why the upload is aborted
            left = (
                f"{self._target}: its multipart upload could not be aborted ({error}); type: "
                f"iobench s3 abort-uploads {self._target}"
            )
            warnings.warn(left, ResourceWarning, stacklevel=2)
        finally:
            self._forget()

    def _create(self, s3: Any, known: dict[str, str]) -> Any:
        return require_fields(s3.create_multipart_upload(**self._where, **known), "UploadId")

    def _adopt(self, upload_id: str) -> None:
        self._id = upload_id
        _unfinished[upload_id] = self._client

    def _forget(self) -> None:
        if self._id is not None:
            _unfinished.pop(self._id, None)
        self._id = None

    def _call(
        self, request: Any, doing: str, meter: Meter, stop: threading.Event | None = None
    ) -> Any:
        return self._client.call(request, meter, doing=doing, where=self._target, stop=stop)

    def _field(self, value: int) -> dict[str, str]:
        return {self._checksum.field: self._checksum.text(value)} if self._checksum else {}

    def _checksum_of(self, views: Sequence[Bytes], meter: Meter) -> int:
        if self._checksum is None:
            return 0
        with meter.phase("checksum"):
            return self._checksum.of(views)

    def _with_checksum(self, request: Any, known: dict[str, str], meter: Meter) -> Any:
        """Return the answer. A server that refuses the checksum is asked again without it.

        That is a fallback, and the upload has no checksum from then on.
        """
        doing, checksum = "uploading", self._checksum
        try:
            return self._call(lambda s3: request(s3, known), doing, meter)
        except IobenchError as error:
            cause = error.__cause__
            if cause is None or checksum is None:
                raise
            if code_of(cause) not in _REFUSED and status_of(cause) != 501:
                raise
            self._checksum = None
            answer = self._call(lambda s3: request(s3, {}), doing, meter)
            reason = f"the server refuses it ({code_of(cause) or 501})"
            meter.fell_back(f"{checksum.name} checksum", "none", reason)
            return answer

    def _checked(self, answer: Any, value: int) -> Any:
        """Return `answer` if its checksum, where it has one, is ours. Raises CorruptedError."""
        if self._checksum is not None:
            found, sent = answer.get(self._checksum.field), self._checksum.text(value)
            if found not in (None, sent):
                raise CorruptedError(
                    f"the server received other bytes: {self._checksum.name} is {found}, "
                    f"{sent} was sent"
                )
        return require_fields(answer, "ETag")

    def _head(self, s3: Any) -> Any:
        """Return the answer to HeadObject, with the checksum if the store keeps one."""
        return require_fields(s3.head_object(**self._where, ChecksumMode="ENABLED"), "ETag")

    def _verify(
        self, answer: Mapping[str, Any], size: int, sent: dict[str, str], meter: Meter
    ) -> None:
        """Compare the checksum that the store returns, in `answer` or else by HeadObject.

        Raises TransferError if the key holds other bytes than the `size` bytes with the checksum
        `sent`. If HeadObject fails or is interrupted, the error says that the object is complete. A
        store that returns no checksum of the whole object is a fallback.
        """
        if self._checksum is None:
            return
        found, name = answer, self._checksum.name
        if not self._checksum.value_in(found):
            try:
                found = self._call(self._head, "checking what was stored", meter)
            except BaseException as error:
                text = (
                    f"the object is complete, with the ETag {answer['ETag']}, so it was left there;"
                    f" only its {name} could not be compared"
                )
                error.add_note(f"{self._target}: {text}")
                if isinstance(error, TransferError):  # a note is no part of the line of a command
                    error.strerror = f"{error.strerror}; {text}"
                raise
        value, (text,) = self._checksum.value_in(found), sent.values()
        stored = found.get("ContentLength", size)
        if stored != size or value not in (text, ""):
            raise TransferError(
                f"{self._target}: the server stored something else ({stored} bytes with {name} "
                f"{value}, not {size} with {text}), which was left there"
            )
        if not value:
            meter.fell_back(
                f"{name} compared after completion",
                "the ETag of the answer",
                "the server returns no checksum of what it stored",
            )

    def _completed_unanswered(
        self, error: TransferError, size: int, sent: dict[str, str], meter: Meter
    ) -> Any:
        """Return the stored object although the answer was lost. Raises `error` without proof.

        Either every answer was lost, or a later attempt found no such upload any more. The proof is
        the size, with the checksum `sent` or the ETag that stores compute from MD5s.
        """
        cause = error.__cause__
        if cause is None or not (is_transient(cause) or code_of(cause) == "NoSuchUpload"):
            raise error
        try:
            found = self._call(self._head, "looking for the object", meter)
        except IobenchError as failure:
            error.add_note(f"{self._target}: its content is not known ({failure})")
            raise error from cause
        etag = etag_of([part.etag for _, part in sorted(self._parts.items())])
        same = bool(sent) and sent.items() <= found.items()
        same = same or (bool(etag) and found["ETag"].strip('"') == etag)
        if not same or found.get("ContentLength") != size:
            raise error
        # An earlier save of the same bytes gives the same proof; this upload may still exist then.
        self.abort()
        return found


KEPT_PART = "part kept"
"""The path under which parts count that the server had already."""


class ResumedUpload(S3Upload):
    """An S3Upload whose parts stay on the server when it ends early.

    `begin` looks for unfinished uploads to the key, takes the newest and aborts the others. `send`
    skips a part that the server has: same number, same size, and same checksum or else MD5 of the
    bytes. So a part is never skipped because of its number alone.
    """

    def __init__(self, client: S3Client, target: S3Target, checksum: Checksum | None) -> None:
        super().__init__(client, target, checksum)
        self._had: dict[int, dict[str, Any]] = {}

    def begin(self, meter: Meter) -> None:
        """Go on with the newest unfinished upload to the key, or begin one."""
        objects = S3Objects(self._client, self._target)
        found = [one for one in objects.uploads() if one.target.key == self._target.key]
        found.sort(key=lambda one: one.initiated)
        while found:
            newest = found.pop()
            parts = self._listed(newest, meter)
            if not parts:  # nothing is lost, and whether it has checksums cannot be known
                objects.abort(newest)
                continue
            for older in found:
                objects.abort(older)
            self._take(newest, parts)
            return
        super().begin(meter)

    def send(self, number: int, views: Sequence[Bytes], meter: Meter) -> None:
        had = self._had.get(number)
        size = sum(map(len, views))
        if had is None or had["Size"] != size:
            super().send(number, views, meter)
            return
        value = self._checksum_of(views, meter)
        sent = self._field(value)
        known = {name: had[name] for name in sent if had.get(name)}
        if (known != sent) if known else (had["ETag"].strip('"') != _md5(views)):
            super().send(number, views, meter)
            return
        meter.count(KEPT_PART, size)
        self._parts[number] = SentPart(etag=had["ETag"], size_bytes=size, checksum=value)

    def fail(self) -> None:
        self.leave()

    def _take(self, upload: UnfinishedUpload, parts: list[dict[str, Any]]) -> None:
        self._adopt(upload.upload_id)
        self._had = {one["PartNumber"]: one for one in parts}
        if self._checksum and not any(one.get(self._checksum.field) for one in parts):
            self._checksum = None  # the server took none when the upload began

    def _listed(self, upload: UnfinishedUpload, meter: Meter) -> list[dict[str, Any]]:
        """Return the parts that the server has; none if the upload no longer exists."""

        def list_all(s3: Any) -> list[dict[str, Any]]:
            pages = s3.get_paginator("list_parts").paginate(
                **self._where, UploadId=upload.upload_id
            )
            return [part for page in pages for part in page.get("Parts", [])]

        try:
            return self._call(list_all, "listing the parts of an upload to", meter)  # type: ignore[no-any-return]  # boto3 has no types
        except IobenchError as error:
            if code_of(error.__cause__ or error) != "NoSuchUpload":
                raise
            return []


def _md5(views: Sequence[Bytes]) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    for view in views:
        digest.update(view.data)
    return digest.hexdigest()
