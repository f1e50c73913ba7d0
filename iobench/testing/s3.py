"""Object stores for tests: real servers as child processes, and a bucket as a TestTarget."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from iobench.bench.targets.local_s3 import LocalS3, run_server
from iobench.errors import UnavailableError
from iobench.writers.s3 import S3Writer
from iobench.writers.s3_store.client import S3Client
from iobench.writers.s3_store.objects import S3Objects
from iobench.writers.s3_store.target import S3Target

_T = TypeVar("_T")

# The server writes the headers and the body of an answer on their own. Nagle's algorithm would hold
# each body back until the client acknowledges the headers, which takes 40 ms.
_MOTO = """
from socketserver import StreamRequestHandler
StreamRequestHandler.disable_nagle_algorithm = True
from moto.server import main
main()
"""


@contextmanager
def moto_s3() -> Iterator[LocalS3]:
    """Run moto's S3 server, like `local_s3` runs rclone's.

    It does not check access keys and keeps everything in memory. Raises UnavailableError without
    moto (extra `dev`).
    """
    if find_spec("moto") is None or find_spec("flask") is None:
        raise UnavailableError("moto", "it is not installed.", "Type: pip install 'moto[server]'.")

    def command(port: int, directory: Path) -> list[str]:  # noqa: ARG001 -- keeps no files
        return [sys.executable, "-c", _MOTO, "-H", "127.0.0.1", "-p", str(port)]

    with run_server(command) as server:
        yield server


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
