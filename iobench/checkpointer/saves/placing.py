"""Placing: rank 0 chooses by measured throughput where all ranks write each checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod

from iobench.checkpoint.ledger import Ledger
from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.ranked.assembly import Assembly
from iobench.checkpoint.ranked.order import Order, VoteError
from iobench.checkpoint.ranked.places import LocalPlace, SavePlace
from iobench.checkpoint.ranked.plan import RankPlan
from iobench.checkpoint.save import Save
from iobench.checkpoint.staged import Staged
from iobench.errors import IobenchError
from iobench.remote.direct_save import within_limit
from iobench.remote.local_tier import LocalTier
from iobench.remote.observed import LOCAL, REMOTE
from iobench.remote.placed import decided
from iobench.remote.placement import Placement, PlacementDecision, direct_limit_s
from iobench.remote.probe import probe_bytes

__all__ = ["Placing", "RemotePlace"]


@dataclass(kw_only=True)
class RemotePlace:
    """The remote tier. A save that fails there goes to `local`."""

    tier: LocalTier
    ledger: Ledger
    assembly: Assembly
    choice: PlacementDecision
    local: LocalPlace
    size_bytes: int
    limit_s: float | None
    remote: bool = field(default=True, init=False)
    _began_s: float = field(default_factory=time.monotonic, init=False)
    _manifest: Manifest | None = field(default=None, init=False)

    @contextmanager
    def staged(self, save: Save, serial: int) -> Iterator[Staged]:
        tier = self.tier
        with tier.drain.saving(), tier.remote.writing(serial) as ledger:
            self.assembly.store = tier.remote.store
            self.assembly.writer = tier.remote.direct_writer
            replace = ledger.holds(save.step)
            with tier.remote.store.staged(
                save.step, serial=serial, replace=replace, shared=True
            ) as staged:
                yield staged

    def publish(
        self, save: Save, plan: RankPlan, staged: Staged, votes: Sequence[str], order: Order
    ) -> None:
        # All but the manifest, which another writer writes, counts in the limit.
        left_s = self.limit_s and max(0.001, self._began_s + self.limit_s - time.monotonic())
        with within_limit(self.assembly.writer, left_s, staged.directory):
            self._manifest = self.assembly.publish(
                save, plan, staged, votes, order.serial, order.attempt, decision=self.choice.reason
            )
        self._elapsed_s = time.monotonic() - self._began_s

    def committed(self, save: Save, serial: int) -> None:
        found, tier = self._manifest, self.tier
        assert found is not None
        try:  # first: the drain forgets what the ledger of the remote tier does not have
            tier.remote.recorded(save.step, serial, save.created_s, found.size_bytes)
        finally:
            tier.drain.sent_directly(save, serial, found.size_bytes, self._elapsed_s)
            tier.drain.placed(save.step, REMOTE, self.choice.reason)

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
        return -(-probe_bytes(self.size_bytes) // ranks) if self.choice.probe == LOCAL else 0

    def probed(self, size_bytes: int, elapsed_s: float, *, ok: bool) -> None:
        self.tier.rates.add(LOCAL, size_bytes, elapsed_s, ok=ok)


class Placing:
    """Chooses the place of each save of all ranks by measured throughput, in rank 0."""

    def __init__(
        self, tier: LocalTier, ledger: Ledger, choice: Placement, assembly: Assembly
    ) -> None:
        """`assembly` is that of the local tier."""
        self._tier, self._ledger, self._choice, self._assembly = tier, ledger, choice, assembly
        self._remote = Assembly(
            store=tier.remote.store,
            writer=tier.remote.writer,
            world=assembly.world,
            hosts=assembly.hosts,
        )
        self._measured: tuple[RankPlan, int] | None = None

    def place(self, save: Save, plan: RankPlan) -> SavePlace:
        """Return the place of `save`. Raises TransferError when the tiers cannot be looked at."""
        size, tier = self._size_of(plan), self._tier
        found = decided(tier, self._ledger, self._choice, save.step, size)
        local = LocalPlace(
            store=tier,
            ledger=self._ledger,
            assembly=self._assembly,
            decision=found.reason,
            noted=lambda save: tier.drain.placed(save.step, LOCAL, found.reason),
        )
        if found.tier != REMOTE:
            return local
        return RemotePlace(
            tier=tier,
            ledger=self._ledger,
            assembly=self._remote,
            choice=found,
            local=local,
            size_bytes=size,
            limit_s=direct_limit_s(self._choice, found, size),
        )

    def _size_of(self, plan: RankPlan) -> int:
        """Return the bytes of the tensors of all ranks."""
        if self._measured is None or self._measured[0] is not plan:
            assert plan.whole is not None  # this is rank 0
            size = sum(
                prod(box.sizes) * box.dtype.itemsize for boxes in plan.whole.boxes for box in boxes
            )
            self._measured = plan, size
        return self._measured[1]
