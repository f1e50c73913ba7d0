"""RankPersister: writes snapshots in the background, the same ones in all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from iobench.checkpoint.persister import Persister, Snapshot
from iobench.checkpoint.ranked.content import RankContent
from iobench.checkpoint.slots import SlotPool
from iobench.ranks.control import Control
from iobench.writers.blocks import interpreter_end
from iobench.writers.blocks.channel import Lease, LeaseState, OnFull

__all__ = ["RankPersister"]

_Lease = Lease[Snapshot[RankContent]]


class RankPersister(Persister[RankContent]):
    """The persister of one rank.

    Rank 0 writes its newest snapshot next, or the oldest with `in_order`, and announces it. The
    others keep every snapshot until rank 0 has announced it or a later one. All ranks have the same
    snapshots: one that a rank cannot take is submitted without data, and its save fails in all
    ranks.
    """

    def __init__(
        self,
        pool: SlotPool,
        persist: Callable[[Snapshot[RankContent]], object],
        *,
        control: Control,
        deadline_s: float,
        in_order: bool = False,
    ) -> None:
        super().__init__(pool, persist, in_order=in_order or control.world.rank > 0)
        self._follow_in(control, deadline_s)

    def _follow_in(self, control: Control, deadline_s: float) -> None:
        self._control, self._deadline_s = control, deadline_s
        self._waiting: dict[int, _Lease] = {}
        self.failed = list[int]()
        """Numbers of the saves whose failure was not raised yet."""

    def take(self, lease: _Lease, *, pinned: bool, on_full: OnFull = "wait") -> bool:
        """Like that of Persister; rank 0 decides about "skip" and "supersede" for all ranks.

        With "wait" each rank waits for a slot of its own, without the others.
        """
        if on_full == "wait":
            return super().take(lease, pinned=pinned)
        if self._control.world.rank == 0:
            taken, error = True, None
            try:
                taken = super().take(lease, pinned=pinned, on_full=on_full)
            except Exception as failure:  # noqa: BLE001 -- raised below, after the others know
                error = failure
            self._decide({"taken": taken, "gone": self._gone_numbers()})
            if error is not None:
                raise error
        else:
            decided = self._decide(None)
            for number in decided["gone"]:
                self._drop(number)
            taken = bool(decided["taken"]) and super().take(lease, pinned=pinned)
        return taken

    def _gone_numbers(self) -> list[int]:
        """Return the numbers of the snapshots that were dropped, and of others that have ended."""
        return [number for number, one in list(self._waiting.items()) if _dropped(one)]

    def _decide(self, decision: object) -> dict[str, Any]:
        found: dict[str, Any] = self._control.broadcast(
            "slot", decision, deadline_s=self._deadline_s
        )
        return found

    def _drop(self, number: int) -> None:
        lease = self._waiting.pop(number, None)
        if lease is not None:
            self._channel.give_back(lease, LeaseState.QUEUED)

    def submit(self, lease: _Lease) -> None:
        self._remember(lease)
        super().submit(lease)

    def give(self, lease: _Lease) -> None:
        """Submit a snapshot that this rank could not take, so that its save fails everywhere."""
        if lease.state is not LeaseState.HELD or lease.item.save.error is None:
            super().give(lease)
            return
        self._remember(lease)
        if interpreter_end.begun():
            self.wait()
            self._write(lease.item)
            super().give(lease)
        else:
            self._channel.submit(lease)

    def give_back(self, lease: _Lease) -> None:
        """Return the slot of a snapshot that all ranks know about."""
        super().give(lease)

    def _remember(self, lease: _Lease) -> None:
        left = {n: one for n, one in list(self._waiting.items()) if not _dropped(one)}
        self._waiting = {**left, lease.item.content.number: lease}

    def _write(self, snapshot: Snapshot[RankContent]) -> None:
        before = len(self._failures)
        super()._write(snapshot)
        if len(self._failures) > before:
            self.failed.append(snapshot.content.number)

    def raise_failure(self) -> None:
        self.failed.clear()
        super().raise_failure()


def _dropped(lease: _Lease) -> bool:
    return lease.state in (LeaseState.DONE, LeaseState.FAILED, LeaseState.LOST)
