"""Offering: exactly one offer of each save that the ranks write, in every rank."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from iobench.checkpoint.ranked.part import Part
from iobench.replicas.header import SaveHeader
from iobench.replicas.recovery import Version
from iobench.replicas.replicator import Offer, Replicator
from iobench.writers.image import FileImage

__all__ = ["Offering"]


class Offering:
    """`with Offering(...) as offering:` around the write of a part.

    The block calls `make` when the bytes are known. If it does not, the rank tells the others at
    the end that it has none. The block ends when the memory may change again.
    """

    def __init__(self, replicator: Replicator | None, version: Version, created_s: float) -> None:
        self._replicator, self._version, self._created_s = replicator, version, created_s
        self.table: str | None = None
        """In rank 0: the part of the index that has the tensors of all ranks, as JSON."""
        self._offer: Offer | None = None
        self._failure = ""

    @property
    def wanted(self) -> bool:
        """Whether the checkpoint is replicated."""
        return self._replicator is not None

    def make(self, image: FileImage, part: Part) -> None:
        """Offer the bytes of a part, which are a snapshot: they do not change in this block."""
        assert self._replicator is not None
        try:
            header = SaveHeader(part=part, created_s=self._created_s, table=self.table).to_bytes()
        except Exception as error:  # noqa: BLE001 -- told as the replica's; the save goes on
            self._failure = f"{type(error).__name__}: {error}"
            return
        self._offer = self._replicator.offer(self._version, image, header)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        if self._replicator is None:
            return
        if self._offer is None:
            if error is not None:
                self._failure = f"{type(error).__name__}: {error}"
            self._replicator.offer(self._version, None, failure=self._failure)
        else:
            self._offer.wait()
