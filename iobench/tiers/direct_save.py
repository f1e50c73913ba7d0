"""DirectCommitter: writes a checkpoint to the remote tier, without a local copy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from iobench.checkpoint.commit import Committer
from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.object_store import ObjectStore
from iobench.checkpoint.save import Save
from iobench.checkpoint.serialized import Serialized
from iobench.checkpoint.staged import Staged
from iobench.errors import TransferError
from iobench.units import format_seconds
from iobench.writers.image import Bytes
from iobench.writers.s3 import S3Writer
from iobench.writers.s3_store.time_limit import TimeLimit

__all__ = ["DirectCommitter"]


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
        if self.limit_s is None or (limit := self._limit) is None:
            return super().commit(save, serialized, memory, rate_bytes_per_s=rate_bytes_per_s)
        limited, passed = self._through_writer(), False
        try:
            with limit.within(self.limit_s):
                try:
                    return limited.commit(
                        save, serialized, memory, rate_bytes_per_s=rate_bytes_per_s
                    )
                finally:
                    passed = limit.passed
        except TransferError as error:
            if not passed:
                raise
            raise TransferError(
                f"{self.store}: step {save.step} is not there after "
                f"{format_seconds(self.limit_s)}, the expected time and that of a local save"
            ) from error

    @property
    def _limit(self) -> TimeLimit | None:
        return self.writer.client.time_limit if isinstance(self.writer, S3Writer) else None

    def _through_writer(self) -> Self:
        """Return this Committer, all of whose requests are those of `writer`."""
        assert isinstance(self.store, ObjectStore)
        assert isinstance(self.writer, S3Writer)
        return replace(self, store=self.store.using(self.writer), limit_s=None)

    def _publish(self, staged: Staged, manifest: str) -> None:
        if self._limit is not None and not self._limit.lift():
            raise TransferError(f"{staged.directory}: the time limit has passed")
        super()._publish(staged, manifest)
