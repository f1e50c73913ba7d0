"""DirectCommitter: writes a checkpoint to the remote tier, without a local copy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from iobench.checkpoint.commit import Committer
from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.object_store import ObjectStore
from iobench.checkpoint.save import Save
from iobench.checkpoint.serialized import Serialized
from iobench.checkpoint.staged import Staged
from iobench.errors import TransferError
from iobench.units import format_seconds
from iobench.writers.base import Writer
from iobench.writers.image import Bytes
from iobench.writers.s3 import S3Writer

__all__ = ["DirectCommitter", "within_limit"]


@dataclass(frozen=True, kw_only=True)
class DirectCommitter(Committer):
    """The Committer of the remote tier.

    A bucket that does not have all files after `limit_s` seconds has failed; None: no limit but
    the timeouts of the writer. `writer` must not be in use elsewhere: the limit ends all of its
    requests. It does not end the write of the manifest: whether that is visible must be known.
    """

    limit_s: float | None = None

    def commit(
        self,
        save: Save,
        serialized: Serialized,
        memory: Bytes | None = None,
        *,
        rate_bytes_per_s: int | None = None,
    ) -> Manifest:
        limit_s, place = self.limit_s, f"{self.store}, step {save.step}"
        store = self.store
        if limit_s is None or not isinstance(store, ObjectStore):
            return super().commit(save, serialized, memory, rate_bytes_per_s=rate_bytes_per_s)
        limited = replace(self, store=store.using(self.writer), limit_s=None)
        with within_limit(self.writer, limit_s, place):
            return limited.commit(save, serialized, memory, rate_bytes_per_s=rate_bytes_per_s)

    def _publish(self, staged: Staged, manifest: list[bytes]) -> None:
        if isinstance(self.writer, S3Writer) and not self.writer.client.time_limit.lift():
            raise TransferError(f"{staged.directory}: the time limit has passed")
        super()._publish(staged, manifest)


@contextmanager
def within_limit(writer: Writer, limit_s: float | None, place: str | Path) -> Iterator[None]:
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
            f"{place}: not written within {format_seconds(limit_s)}, the expected time and that of "
            "a local save together"
        ) from error
