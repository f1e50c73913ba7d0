"""Placing: rank 0 chooses by measured throughput where all ranks write each checkpoint."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from iobench.checkpoint.content import Content
from iobench.checkpoint.ledger import Ledger
from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.object_store import ObjectStore
from iobench.checkpoint.place import LocalPlace, Place
from iobench.checkpoint.ranked.messages import VoteError
from iobench.checkpoint.save import Save
from iobench.checkpoint.staged import Staged
from iobench.checkpoint.store import CheckpointStore
from iobench.errors import IobenchError, TransferError, transfer_errors
from iobench.remote.local_tier import LocalTier
from iobench.remote.placement import LOCAL, REMOTE, Placement, PlacementDecision, choose
from iobench.units import MIB, format_size
from iobench.writers.base import Writer

_LEAST_PROBE, _LARGEST_PROBE = 4 * MIB, 64 * MIB
"""A smaller probe would measure the fixed time of a write."""


@dataclass(kw_only=True)
class RemotePlace:
    """The remote tier. A save that fails there, or takes longer than `limit_s`, goes to `local`."""

    tier: LocalTier
    local: LocalPlace
    size_bytes: int
    decision: str
    probe: bool
    limit_s: float | None
    remote: bool = field(default=True, init=False)
    _began_s: float = field(default_factory=time.monotonic, init=False)

    @property
    def store(self) -> CheckpointStore:
        store = self.tier.remote.store
        return store.using(self.writer) if isinstance(store, ObjectStore) else store

    @property
    def writer(self) -> Writer:
        return self.tier.remote.direct_writer

    @contextmanager
    def staged(self, save: Save, serial: int) -> Iterator[Staged]:
        remote = self.tier.remote
        where = f"{remote}, step {save.step}"
        with self.tier.drain.saving(), remote.using(self.limit_s, where):
            if not remote.is_open:
                raise TransferError(f"{remote}: it does not answer")
            shared, replace = self.local.shared, remote.holds(save.step)
            with self.store.staged(
                save.step, serial=serial, replace=replace, shared=shared
            ) as staged:
                yield staged

    def committed(self, save: Save, manifest: Manifest) -> None:
        elapsed_s, size, tier = time.monotonic() - self._began_s, manifest.size_bytes, self.tier
        try:  # first: the drain forgets what the ledger of the remote tier does not have
            tier.remote.recorded(save.step, manifest.serial, save.created_s, size)
        finally:
            tier.drain.sent_directly(save, manifest.serial, size, elapsed_s)
            tier.drain.placed(save.step, REMOTE, self.decision)

    def instead(self, save: Save, failure: BaseException) -> LocalPlace | None:
        of_place = failure.of_place if isinstance(failure, VoteError) else True
        if not of_place or not isinstance(failure, IobenchError | VoteError):
            return None
        tier, elapsed_s = self.tier, time.monotonic() - self._began_s
        tier.rates.add(REMOTE, self.size_bytes, elapsed_s, ok=False)
        tier.drain.tidy_later()
        self.local.warning = (
            f"step {save.step} is written to {tier}, because {tier.remote} failed: {failure}"
        )
        return self.local

    def probe_bytes(self, ranks: int) -> int:
        part = max(_LEAST_PROBE, min(self.size_bytes // 64, _LARGEST_PROBE))
        return -(-min(self.size_bytes, part) // ranks) if self.probe else 0


@dataclass(frozen=True)
class Placing:
    """Chooses the place of each save by `choice`, in rank 0. Of the local tier: `writer`, `ledger`.

    `shared`: several ranks write.
    """

    tier: LocalTier
    writer: Writer
    ledger: Ledger
    choice: Placement
    shared: bool

    def place(self, save: Save, content: Content) -> Place:
        """Return the place of `save`. Raises TransferError when the tiers cannot be looked at."""
        size, tier = content.job_bytes, self.tier
        if self.ledger.holds(save.step):
            found = PlacementDecision(tier=LOCAL, reason="it replaces a local checkpoint")
        else:
            closed = self._closed(size)
            found = choose(tier.rates, self.choice.goal, size_bytes=size, closed=closed)
        tier.rates.current = found.tier
        local = LocalPlace(
            store=tier,
            writer=self.writer,
            ledger=self.ledger,
            shared=self.shared,
            decision=found.reason,
            noted=lambda save: tier.drain.placed(save.step, LOCAL, found.reason),
        )
        if found.tier == LOCAL:
            return local
        return RemotePlace(
            tier=tier,
            local=local,
            size_bytes=size,
            decision=found.reason,
            probe=found.probe,
            limit_s=found.limit_s,
        )

    def _closed(self, size_bytes: int) -> dict[str, str]:
        """Return the tiers that cannot take so many bytes, with the reason."""
        closed = {} if self.tier.remote.is_open else {REMOTE: f"{REMOTE} does not answer"}
        with transfer_errors("measuring", self.tier.directory):
            free = shutil.disk_usage(self.tier.directory).free
        return closed | (
            {LOCAL: f"{LOCAL} has {format_size(free)} free"} if free < size_bytes else {}
        )
