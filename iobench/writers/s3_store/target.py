"""S3Target: a bucket and a key or prefix, written as `s3://bucket/prefix`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import PurePath

from iobench.errors import UsageError

SCHEME = "s3://"
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_MOST_KEY_BYTES = 1024  # in UTF-8; S3's limit


def is_s3(target: object) -> bool:
    """Return whether `target` is an S3 URL."""
    return isinstance(target, str) and target.startswith(SCHEME)


@dataclass(frozen=True, kw_only=True)
class S3Target:
    """A bucket and a key, or a prefix of keys. Neither begins or ends with a slash."""

    bucket: str
    key: str

    @classmethod
    def parse(cls, target: object) -> S3Target:
        """Parse `target`. Raises UsageError for anything but `s3://bucket[/key]`."""
        if not is_s3(target):
            shown = os.fspath(target) if isinstance(target, str | PurePath) else target
            raise UsageError(
                f"{shown}: writer 's3' needs a target s3://bucket/prefix (iobench run: --s3-local)"
            )
        bucket, _, key = str(target).removeprefix(SCHEME).partition("/")
        # The message does not show the target: with @ or : it may contain credentials.
        if not bucket or {"@", ":"} & {*bucket}:
            raise UsageError("the target names no bucket; write s3://bucket/prefix")
        if not _BUCKET.fullmatch(bucket):
            raise UsageError(
                f"{target}: no bucket is called {bucket!r}; a name has 3 to 63 letters, digits, "
                "dots and hyphens"
            )
        key = key.strip("/")
        bad = key and not {"", ".", ".."}.isdisjoint(key.split("/"))
        if bad or len(key.encode()) > _MOST_KEY_BYTES:
            raise UsageError(
                f"{target}: a key has at most {_MOST_KEY_BYTES} bytes, and no empty parts, '.' or "
                "'..'"
            )
        return cls(bucket=bucket, key=key)

    @classmethod
    def object(cls, target: object) -> S3Target:
        """Parse `target` as one object. Raises UsageError for a bucket without a key."""
        found = cls.parse(target)
        if not found.key:
            raise UsageError(f"{target}: names a bucket and no object; write s3://bucket/key")
        return found

    def below(self, path: str) -> S3Target:
        """Return the object `path` under this prefix."""
        return S3Target.parse(f"{self}/{path}")

    def __str__(self) -> str:
        return f"{SCHEME}{self.bucket}/{self.key}" if self.key else f"{SCHEME}{self.bucket}"
