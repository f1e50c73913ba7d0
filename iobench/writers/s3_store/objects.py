"""S3Objects: the objects under a prefix, and the unfinished uploads of killed processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from iobench.errors import IobenchError
from iobench.writers.s3_store.client import S3Client
from iobench.writers.s3_store.errors import CorruptedError, code_of, require_fields
from iobench.writers.s3_store.target import S3Target
from iobench.writers.transfer import Meter

_AT_ONCE = 1000  # keys in one DeleteObjects


@dataclass(frozen=True, kw_only=True)
class UnfinishedUpload:
    """A multipart upload that is neither completed nor aborted. Its parts cost money."""

    target: S3Target
    upload_id: str
    initiated: datetime


def abort_upload(
    client: S3Client, target: S3Target, upload_id: str, attempts: int | None = None
) -> None:
    """Abort an upload. One that no longer exists is not an error."""
    where = {"Bucket": target.bucket, "Key": target.key, "UploadId": upload_id}
    try:
        client.call(
            lambda s3: s3.abort_multipart_upload(**where),
            Meter(),
            doing="aborting an upload to",
            where=target,
            attempts=attempts,
        )
    except IobenchError as error:
        if code_of(error.__cause__ or error) != "NoSuchUpload":
            raise


class S3Objects:
    """The objects and the unfinished uploads at the key `prefix` and below it.

    Every method raises what `S3Client.call` raises.
    """

    def __init__(self, client: S3Client, prefix: S3Target) -> None:
        self._client, self._prefix = client, prefix

    @property
    def endpoint(self) -> str:
        """The URL of the endpoint, without credentials."""
        return self._client.endpoint

    def keys(self) -> list[str]:
        """Return the keys of all objects."""
        pages = self._pages("list_objects_v2", "Contents", "listing")
        return [entry["Key"] for entry in pages if self._is_ours(entry["Key"])]

    def names(self, beginning: str) -> list[str]:
        """Return the names directly below the prefix that start with `beginning`.

        A name counts only if there are objects below it.
        """
        where = self._prefix.key and f"{self._prefix.key}/"
        pages = self._pages(
            "list_objects_v2", "CommonPrefixes", "listing",
            Prefix=where + beginning, Delimiter="/",
        )  # fmt: skip
        return [entry["Prefix"].removeprefix(where).strip("/") for entry in pages]

    def unfinished(self) -> list[str]:
        """Return the keys of all unfinished uploads, including those of running processes."""
        return [upload.target.key for upload in self.uploads()]

    def uploads(self) -> list[UnfinishedUpload]:
        """Return every unfinished upload, including those of running processes."""
        return [
            UnfinishedUpload(
                target=S3Target(bucket=self._prefix.bucket, key=entry["Key"]),
                upload_id=entry["UploadId"],
                initiated=entry["Initiated"],
            )
            for entry in self._pages("list_multipart_uploads", "Uploads", "listing the uploads of")
            if self._is_ours(entry["Key"])
        ]

    def try_writing(self, name: str) -> None:
        """Begin an upload to `name` and abort it.

        It needs the permissions of a write and never creates an object.
        """
        target = self._prefix.below(name)
        where = {"Bucket": target.bucket, "Key": target.key}
        answer = self._call(
            lambda s3: require_fields(s3.create_multipart_upload(**where), "UploadId"),
            "trying to write",
        )
        try:
            abort_upload(self._client, target, answer["UploadId"])
        except BaseException as error:
            error.add_note(
                f"{target}: an upload is left behind; type: iobench s3 abort-uploads {target}"
            )
            raise

    def abort(self, upload: UnfinishedUpload) -> None:
        """Abort `upload`. An upload that no longer exists is not an error."""
        abort_upload(self._client, upload.target, upload.upload_id)

    def delete(self, keys: list[str]) -> None:
        """Delete the objects with these keys. A missing object is not an error."""
        for start in range(0, len(keys), _AT_ONCE):
            batch = keys[start : start + _AT_ONCE]
            request = {"Objects": [{"Key": key} for key in batch]}
            answer = self._call(
                lambda s3, request=request: s3.delete_objects(
                    Bucket=self._prefix.bucket, Delete=request
                ),
                "deleting objects of",
            )
            deleted = {entry.get("Key") for entry in answer.get("Deleted", [])}
            # DeleteObjects answers 200 with errors per key; a single deletion raises its error.
            for left in (key for key in batch if key not in deleted):
                self._call(
                    lambda s3, key=left: s3.delete_object(Bucket=self._prefix.bucket, Key=key),
                    "deleting an object of",
                )

    def remove(self, last: str = "") -> None:
        """Abort every upload and delete every object. The object `last` is deleted last."""
        for upload in self.uploads():
            self.abort(upload)
        end = self._prefix.below(last).key if last else ""
        keys = self.keys()
        self.delete([key for key in keys if key != end])
        self.delete([key for key in keys if key == end])

    def _is_ours(self, key: str) -> bool:
        """Return whether `key` is the prefix or below it. `run-10` is not below `run-1`."""
        own = self._prefix.key
        return not own or key == own or key.startswith(f"{own}/")

    def _pages(self, operation: str, kind: str, doing: str, **more: str) -> Iterator[Any]:
        where = {"Bucket": self._prefix.bucket, "Prefix": self._prefix.key, **more}

        def all_pages(s3: Any) -> list[Any]:
            found: list[Any] = []
            for page in s3.get_paginator(operation).paginate(**where):
                # Every store names its bucket. boto3 reads the page of a proxy as an empty list.
                if not page.get("Name") and not page.get("Bucket"):
                    raise CorruptedError("the server's answer is not a list of a bucket")
                found += page.get(kind, [])
            return found

        try:
            yield from self._call(all_pages, doing)
        except IobenchError as error:  # rclone's answer for a bucket that never had an upload
            if code_of(error.__cause__ or error) != "NoSuchUpload":
                raise

    def _call(self, request: Any, doing: str) -> Any:
        return self._client.call(request, Meter(), doing=doing, where=self._prefix)
