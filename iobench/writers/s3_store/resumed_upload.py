"""ResumedUpload: goes on with the multipart upload that an ended process left at a key."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from iobench.errors import IobenchError
from iobench.writers.image import Bytes
from iobench.writers.s3_store.checksum import Checksum
from iobench.writers.s3_store.client import S3Client
from iobench.writers.s3_store.errors import code_of
from iobench.writers.s3_store.objects import S3Objects, UnfinishedUpload
from iobench.writers.s3_store.parts import SentPart
from iobench.writers.s3_store.target import S3Target
from iobench.writers.s3_store.upload import S3Upload
from iobench.writers.transfer import Meter

__all__ = ["KEPT_PART", "ResumedUpload"]

KEPT_PART = "part kept"
"""The path under which parts count that the server had already."""


class ResumedUpload(S3Upload):
    """An S3Upload whose parts stay on the server when it ends early.

    `begin` looks for unfinished uploads to the key, takes the newest and aborts the others. `send`
    skips a part that the server has: same number, same size, and same checksum or else MD5 of the
    bytes. So a part is never skipped because of its number alone. End it with `complete`, `abort`,
    or `leave`.
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
