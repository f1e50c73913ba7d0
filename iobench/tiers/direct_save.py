"""DirectCommitter: writes a checkpoint to the remote tier, without a local copy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from iobench.checkpoint.commit import Committer
from iobench.errors import TransferError
from iobench.units import format_seconds
from iobench.writers.base import Writer
from iobench.writers.image import FileImage
from iobench.writers.s3 import S3Writer
from iobench.writers.transfer import Transfer

__all__ = ["DirectCommitter", "within_limit"]


@dataclass(frozen=True, kw_only=True)
class DirectCommitter(Committer):
    """The Committer of the remote tier.

    A bucket that does not have all files after `limit_s` seconds has failed; None: no limit but
    the timeouts of the writer. `writer` must not be in use elsewhere: the limit ends all of its
    requests. The manifest is written by another one, that of `store`, which has no limit: whether
    it is visible must be known in the end.
    """

    limit_s: float | None = None

    def _write(self, images: list[FileImage], directory: str | Path) -> Transfer:
        with within_limit(self.writer, self.limit_s, directory):
            return super()._write(images, directory)


@contextmanager
def within_limit(writer: Writer, limit_s: float | None, directory: str | Path) -> Iterator[None]:
    """End all requests of `writer`, if it is that of a bucket, `limit_s` seconds after the begin.

    Raises TransferError then. None: no limit.
    """
    if limit_s is None or not isinstance(writer, S3Writer):
        yield
        return
    limit, passed = writer.client.time_limit, False
    try:
        with limit.within(limit_s):
            try:
                yield
            finally:
                passed = limit.passed
    except TransferError as error:
        if not passed:
            raise
        raise TransferError(
            f"{directory}: not written within {format_seconds(limit_s)}, the expected time and "
            "that of a local save together"
        ) from error
