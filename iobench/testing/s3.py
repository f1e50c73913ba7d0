"""Bucket: a prefix in a bucket as a TestTarget."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from iobench.writers.s3 import S3Writer
from iobench.writers.s3_store.client import S3Client
from iobench.writers.s3_store.objects import S3Objects
from iobench.writers.s3_store.target import S3Target

_T = TypeVar("_T")


@dataclass(frozen=True)
class Bucket:
    """A TestTarget for a prefix in a bucket of an active server. Leaves no connection open."""

    target: str
    flat = True
    """There are no directories: `a` and `a/b` may both be objects."""

    def locate(self, name: str) -> str:
        """Return the URL of the object `name`."""
        return f"{self.target}/{name}"

    def stored(self, name: str) -> bytes | None:
        """Return the bytes of the object `name`, or None if it does not exist."""

        def get(s3: Any, bucket: str, prefix: str) -> bytes | None:
            try:
                body: bytes = s3.get_object(Bucket=bucket, Key=prefix + name)["Body"].read()
            except s3.exceptions.NoSuchKey:
                return None
            return body

        return self._with_client(get)

    def put(self, name: str, data: bytes) -> None:
        """Store exactly `data` as the object `name`."""
        self._with_client(
            lambda s3, bucket, prefix: s3.put_object(Bucket=bucket, Key=prefix + name, Body=data)
        )

    def names(self) -> set[str]:
        """Return every object, and every unfinished upload as `name (upload)`."""
        prefix = S3Target.parse(self.target)
        objects = S3Objects(self._client, prefix)
        try:
            found = {*objects.keys(), *(f"{u.target.key} (upload)" for u in objects.uploads())}
        finally:
            self._client.close()
        return {name.removeprefix(f"{prefix.key}/") for name in found}

    def _with_client(self, use: Callable[[Any, str, str], _T]) -> _T:
        bucket, _, prefix = self.target.removeprefix("s3://").partition("/")
        try:
            return use(self._client.boto3, bucket, f"{prefix}/")
        finally:
            self._client.close()

    @functools.cached_property
    def _client(self) -> S3Client:
        """The one client of this bucket, as boto3 takes 50 ms to create one.

        It opens new connections after `close`.
        """
        return S3Writer(checksum="none").client
