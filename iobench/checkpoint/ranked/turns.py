"""Turns: in a job of several ranks, rank 0 chooses the snapshot to write, and the others follow."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from iobench.checkpoint.ranked.order import Order
from iobench.ranks.control import Control
from iobench.ranks.together import together
from iobench.writers.blocks import interpreter_end
from iobench.writers.blocks.channel import Lease, LeaseState

__all__ = ["Turns"]

_LOOK_AGAIN_S = 0.05


class Turns:
    """Which snapshot all ranks write next, as the persister of one rank sees it.

    All ranks have the same snapshots, by number. Rank 0 announces the one that it writes next, and
    those that it has dropped. The thread of another rank holds its oldest snapshot, waits for the
    order, and writes the snapshot that it names in its place: `announced` returns this order.
    """

    def __init__(
        self, control: Control, announced: Callable[[], Order], *, deadline_s: float
    ) -> None:
        self.leads = control.world.rank == 0
        self.announced = announced
        self._control, self._deadline_s = control, deadline_s
        self._waiting: dict[int, Lease[Any]] = {}
        self._begun, self._dropped, self._gone = set[int](), set[int](), deque[int]()
        self._arrived = threading.Condition()

    def agreed(self, work: Callable[[], Any]) -> list[Any]:
        """Return the results of `work` in all ranks. An error is raised in all of them."""
        return together(self._control, "memory", work, deadline_s=self._deadline_s)[1]

    # Rank 0.

    def begin(self, number: int) -> None:
        """Record that a snapshot is written."""
        self._begun.add(number)

    def ended(self, number: int) -> None:
        """Record that a snapshot has no slot any more: without `begin`, it was dropped."""
        if self.leads and number >= 0 and number not in self._begun:
            self._gone.append(number)
        self._begun.discard(number)

    def newly_gone(self) -> list[int]:
        """Return the numbers of the snapshots that were dropped since the last call."""
        return [self._gone.popleft() for _ in range(len(self._gone))]

    # All ranks.

    def decided(self, reserve: Callable[[], bool], drop: Callable[[int], None]) -> bool:
        """Return whether `reserve` found a slot in rank 0, the only one that calls it.

        The other ranks `drop` what rank 0 has dropped for it. An error of rank 0 is raised there.
        """
        told, error = None, None
        if self.leads:
            taken = True
            try:
                taken = reserve()
            except Exception as failure:  # noqa: BLE001 -- raised below, after the others know
                error = failure
            told = {"taken": taken, "gone": list(self._gone)}
        found = self._control.broadcast("slot", told, deadline_s=self._deadline_s)
        if error is not None:
            raise error
        if not self.leads:
            for number in found["gone"]:
                drop(number)
        return bool(found["taken"])

    # The other ranks.

    def remember(self, lease: Lease[Any]) -> None:
        """Record a snapshot of this rank, which rank 0 may announce."""
        left = {n: one for n, one in list(self._waiting.items()) if not _has_ended(one)}
        self._waiting = {**left, lease.item.number: lease}

    def arrived(self) -> None:
        """Wake the thread that waits in `submitted`."""
        with self._arrived:
            self._arrived.notify_all()

    def submitted(self, number: int) -> Lease[Any]:
        """Wait until this rank has copied the snapshot that rank 0 announced. Raises RankError."""
        while True:
            lease = self._waiting.get(number)
            if lease is not None and (lease.state is LeaseState.QUEUED or interpreter_end.begun()):
                return lease
            with self._arrived:
                self._arrived.wait(_LOOK_AGAIN_S)
            self._control.check()

    def drop(self, number: int) -> Lease[Any] | None:
        """Record that rank 0 has dropped a snapshot. Return its lease, if it has one here."""
        self._dropped.add(number)
        return self._waiting.pop(number, None)

    def is_dropped(self, number: int) -> bool:
        """Return whether rank 0 has dropped this snapshot."""
        return number in self._dropped

    def forget(self, number: int) -> None:
        """Record that the thread knows of a dropped snapshot."""
        self._dropped.discard(number)


def _has_ended(lease: Lease[Any]) -> bool:
    return lease.state in (LeaseState.DONE, LeaseState.FAILED, LeaseState.LOST)
