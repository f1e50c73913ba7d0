"""TestTarget: the files of one check, accessed without the writer under test."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from iobench.writers.s3 import S3Writer
from iobench.writers.s3_store.client import S3Client
from iobench.writers.s3_store.objects import S3Objects
from iobench.writers.s3_store.target import S3Target

_FUSE_RELEASES_WITHIN_S = 10.0


class TestTarget(Protocol):
    """An empty target for one check. Implement it for targets that are not directories."""

    @property
    def target(self) -> str:
        """The argument for a writer's `write`, `read` and `available`."""

    def locate(self, name: str) -> str:
        """Return the argument for a writer's `open` to the file `name`."""

    def stored(self, name: str) -> bytes | None:
        """Return the bytes under `name`, or None if it does not exist."""

    def put(self, name: str, data: bytes) -> None:
        """Store exactly `data` under `name`."""

    def names(self) -> set[str]:
        """Return every name, including hidden and temporary ones, but without directories."""


# pytest collects imported classes whose name begins with Test, and warns about this one. It is set
# here because an attribute in the body would be a member of the protocol.
TestTarget.__test__ = False  # type: ignore[attr-defined]  # pytest's: no test class


@dataclass(frozen=True)
class Directory:
    """A directory of a mounted file system. It is created if it is missing."""

    path: Path

    def __post_init__(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    @property
    def target(self) -> str:
        """The directory's path, for a writer."""
        return str(self.path)

    def locate(self, name: str) -> str:
        """Return the path of the file `name`."""
        return str(self.path / name)

    def stored(self, name: str) -> bytes | None:
        """Return the bytes of the file `name`, or None if it does not exist."""
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def put(self, name: str, data: bytes) -> None:
        """Write exactly `data` to the file `name`."""
        (self.path / name).write_bytes(data)

    def names(self) -> set[str]:
        """Return every name, see `TestTarget`. On FUSE, it first waits for hidden files to go.

        libfuse keeps a replaced file that is open as `.fuse_hidden...`, until it has handled the
        RELEASE of its close. The kernel does not wait for that. A file that stays is returned.
        """
        until = time.monotonic() + _FUSE_RELEASES_WITHIN_S
        while True:
            found = [path for path in self.path.rglob("*") if not path.is_dir()]
            hidden = any(path.name.startswith(".fuse_hidden") for path in found)
            if not hidden or time.monotonic() > until:
                return {str(path.relative_to(self.path)) for path in found}
            time.sleep(0.01)


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
        with self._opened() as (client, prefix):
            key = f"{prefix.key}/{name}"
            try:
                found = client.boto3.get_object(Bucket=prefix.bucket, Key=key)
                body: bytes = found["Body"].read()
            except client.boto3.exceptions.NoSuchKey:
                return None
            return body

    def put(self, name: str, data: bytes) -> None:
        """Store exactly `data` as the object `name`."""
        with self._opened() as (client, prefix):
            key = f"{prefix.key}/{name}"
            client.boto3.put_object(Bucket=prefix.bucket, Key=key, Body=data)

    def names(self) -> set[str]:
        """Return every object, and every unfinished upload as `name (upload)`."""
        with self._opened() as (client, prefix):
            objects = S3Objects(client, prefix)
            found = {*objects.keys(), *(f"{u.target.key} (upload)" for u in objects.uploads())}
        return {name.removeprefix(f"{prefix.key}/") for name in found}

    @contextmanager
    def _opened(self) -> Iterator[tuple[S3Client, S3Target]]:
        """Close the connections after the block; the client opens new ones."""
        try:
            yield self._client, S3Target.parse(self.target)
        finally:
            self._client.close()

    @functools.cached_property
    def _client(self) -> S3Client:
        """The one client of this bucket, as boto3 takes 50 ms to create one."""
        return S3Writer(checksum="none").client
