"""PlacedCommitter: writes each checkpoint to the tier that a Placement chooses."""

from __future__ import annotations

import os
import time
import warnings
from dataclasses import dataclass

from iobench.checkpoint.commit import CommitLedger, Committer
from iobench.checkpoint.ledger import Ledger
from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.save import Save
from iobench.checkpoint.serialized import Serialized
from iobench.errors import IobenchError, transfer_errors
from iobench.remote.direct_save import DirectCommitter
from iobench.remote.local_tier import LocalTier
from iobench.remote.observed import LOCAL, REMOTE
from iobench.remote.placement import (
    Placement,
    PlacementDecision,
    TierRoom,
    choose,
    direct_limit_s,
)
from iobench.remote.probe import probe_bytes, write_probe
from iobench.writers.image import Bytes

__all__ = ["PlacedCommitter", "decided"]


@dataclass(frozen=True, kw_only=True)
class PlacedCommitter(Committer):
    """The Committer of a local tier, which sends a checkpoint to the remote tier where chosen.

    A remote tier that fails is left at once: the same checkpoint is written to the local tier.
    """

    serials: Ledger
    tier: LocalTier
    choice: Placement

    def commit(
        self,
        save: Save,
        serialized: Serialized,
        memory: Bytes | None = None,
        *,
        rate_bytes_per_s: int | None = None,
    ) -> Manifest:
        decision = decided(self.tier, self.ledger, self.choice, save.step, save.size_bytes)
        where = REMOTE
        manifest = None
        if decision.tier == REMOTE:
            manifest = self._direct(save, serialized, memory, decision)
        if manifest is None:
            where = LOCAL
            local = Committer(
                store=self.store, writer=self.writer, ledger=self.ledger, decision=decision.reason
            )
            manifest = local.commit(save, serialized, memory, rate_bytes_per_s=rate_bytes_per_s)
        self.tier.drain.placed(save.step, where, decision.reason)
        if decision.probe == LOCAL and where == REMOTE and memory is not None:
            self._probe(memory[: save.size_bytes], rate_bytes_per_s)
        return manifest

    def _direct(
        self, save: Save, serialized: Serialized, memory: Bytes | None, decision: PlacementDecision
    ) -> Manifest | None:
        """Write the checkpoint to the remote tier; None if it is not durable there."""
        tier, began_s = self.tier, time.monotonic()
        try:
            with (
                tier.drain.saving(),
                tier.remote.writing(save.serial or self.serials.new_serial()) as ledger,
            ):
                remote = DirectCommitter(
                    store=tier.remote.store,
                    writer=tier.remote.direct_writer,
                    ledger=ledger,
                    decision=decision.reason,
                    limit_s=direct_limit_s(self.choice, decision, save.size_bytes),
                )
                limit = tier.remote.options.rate_bytes_per_s
                manifest = remote.commit(save, serialized, memory, rate_bytes_per_s=limit)
                serial = ledger.serial_of(save)
        except IobenchError as error:
            if save.status == "committed":
                raise
            tier.rates.add(REMOTE, save.size_bytes, time.monotonic() - began_s, ok=False)
            tier.drain.tidy_later()
            warnings.warn(
                f"step {save.step} is written to {tier}, because {tier.remote} failed: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            return None
        tier.drain.sent_directly(save, serial, save.size_bytes, time.monotonic() - began_s)
        return manifest

    def _probe(self, memory: Bytes, rate_bytes_per_s: int | None) -> None:
        """Measure the local tier with a part of a checkpoint."""
        size, began_s, ok = probe_bytes(len(memory)), time.monotonic(), True
        try:
            write_probe(self.writer, self.tier.directory, memory[:size], rate_bytes_per_s)
        except IobenchError:
            ok = False
        self.tier.rates.add(LOCAL, size, time.monotonic() - began_s, ok=ok)


def decided(
    tier: LocalTier, ledger: CommitLedger, choice: Placement, step: int, size_bytes: int
) -> PlacementDecision:
    """Return where the save of `step` goes; the tier is the current one from now on.

    Raises TransferError when the local tier cannot be looked at.
    """
    if ledger.holds(step):
        return PlacementDecision(tier=LOCAL, reason="it replaces a local checkpoint")
    with transfer_errors("measuring", tier.directory):
        found = os.statvfs(tier.directory)
    rooms = [TierRoom(name=LOCAL, free_bytes=found.f_bavail * found.f_frsize)]
    if tier.remote.is_open:
        rooms.append(TierRoom(name=REMOTE))
    decision = choose(
        tier.rates.history(), rooms, choice, size_bytes=size_bytes, now_s=time.monotonic()
    )
    tier.rates.chosen(decision.tier)
    return decision
