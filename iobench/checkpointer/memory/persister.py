"""RankMemoryPersister: writes snapshots from the memory tiers of all ranks, in the same order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from iobench.checkpoint.persister import Snapshot
from iobench.checkpoint.ranked.content import RankContent
from iobench.checkpoint.ranked.persister import RankPersister
from iobench.checkpointer.saves.committer import RankCommitter
from iobench.ranks.control import Control
from iobench.ranks.together import together
from iobench.remote.memory_persister import MemoryPersister
from iobench.remote.memory_pool import MemoryPool
from iobench.remote.memory_slot import Kept
from iobench.remote.memory_status import MemoryStatusFile
from iobench.writers.blocks import interpreter_end
from iobench.writers.blocks.channel import Lease, LeaseState, OnFull
from iobench.writers.image import Bytes, FileImage

__all__ = ["RankMemoryPersister"]

_Lease = Lease[Snapshot[RankContent]]

_LOOK_AGAIN_S = 0.05


class RankMemoryPersister(RankPersister, MemoryPersister[RankContent]):
    """The persister of one rank with memory tiers. All ranks have as many slots as the fewest.

    Before each snapshot the ranks tell how many slots they have or could have: the lowest number
    counts in all of them, so each rank finds room for the same snapshots. Rank 0 chooses what is
    written next, like a MemoryPersister, and announces its number. Its thread in the other ranks
    holds the oldest snapshot, and writes the one that is announced. A snapshot that rank 0 drops is
    announced too.
    """

    _waits_for_room = False  # rank 0 may announce the snapshot that waits here

    def __init__(
        self,
        pool: MemoryPool,
        committer: RankCommitter,
        wanted: Callable[..., set[int]],
        serial_of: Callable[..., int],
        *,
        control: Control,
        deadline_s: float,
        in_order: bool,
        status: MemoryStatusFile | None,
    ) -> None:
        self._leads, pool.counts_alone = control.world.rank == 0, False
        MemoryPersister.__init__(
            self,
            pool,
            self._committed,
            wanted,
            serial_of,
            in_order=in_order or not self._leads,
            status=status,
        )
        self._follow_in(control, deadline_s)
        self._committer = committer
        committer.gone = self._newly_gone
        if not self._leads:
            self._persist = self._following
        self._begun, self._gone = set[int](), deque[int]()
        self._dropped = set[int]()
        self._arrived = threading.Condition()

    # Memory.

    def _agree(self, size_bytes: int) -> None:
        """Set the number of slots to the lowest one of all ranks.

        Raises StateError in a rank where not a single snapshot fits, and RankError in the others.
        When the slots of a rank must grow, all ranks wait until nothing is in memory any more.
        """
        if interpreter_end.begun():
            self.wait()  # `submit` must not wait for snapshots that are announced after this one

        def grows() -> bool:
            return size_bytes > self._memory.slot_bytes > 0

        def counted() -> list[Any]:
            return [grows()] if grows() else [False, self._memory.counted(size_bytes)]

        every = self._agreed("memory", counted)
        if any(one[0] for one in every):
            self.wait()
            every = self._agreed("memory", lambda: [False, self._memory.counted(size_bytes)])
        self._memory.count = min(one[1] for one in every)

    def _agreed(self, phase: str, work: Callable[[], list[Any]]) -> list[list[Any]]:
        return together(self._control, phase, work, deadline_s=self._deadline_s)[1]

    def take(self, lease: _Lease, *, pinned: bool, on_full: OnFull = "wait") -> bool:
        try:
            self._agree(lease.item.save.size_bytes)
        except BaseException:
            self.give_back(lease)
            raise
        return super().take(lease, pinned=pinned, on_full=on_full)

    def prepare(self, size_bytes: int, *, wait: bool, pinned: bool = False) -> None:
        self._agree(size_bytes)
        super().prepare(size_bytes, wait=wait, pinned=pinned)

    # Which snapshot is written next.

    def _choose(self, waiting: list[_Lease]) -> list[_Lease]:
        failed = next((one for one in waiting if one.item.save.error is not None), None)
        if failed is not None:  # the other ranks wait for it
            return [failed, *(one for one in waiting if one is not failed)]
        return super()._choose(waiting)

    def _write(self, snapshot: Snapshot[RankContent]) -> None:
        self._begun.add(snapshot.content.number)
        super()._write(snapshot)

    def _release(self, snapshot: Snapshot[RankContent]) -> None:
        number = snapshot.content.number
        if self._leads and number >= 0 and number not in self._begun:
            self._gone.append(number)
        self._begun.discard(number)
        super()._release(snapshot)

    def _gone_numbers(self) -> list[int]:
        return list(self._gone)  # not those that were written: the others may not know yet

    def _newly_gone(self) -> list[int]:
        """Return the numbers of the snapshots that rank 0 has dropped since the last call."""
        return [self._gone.popleft() for _ in range(len(self._gone))]

    def _drop(self, number: int) -> None:
        self._dropped.add(number)
        super()._drop(number)

    def _following(self, snapshot: Snapshot[RankContent]) -> None:
        """Write what rank 0 announces until it was this snapshot, or until that is superseded."""
        number = snapshot.content.number
        while number not in self._dropped:
            order = self._committer.announced()
            for gone in order.gone:
                self._drop(gone)
            if order.number == number:
                self._keeping(snapshot)
                return
            if number not in self._dropped:
                other = self._submitted(order.number)
                self._write(other.item)
                self._channel.end(other, LeaseState.DONE)
        self._dropped.discard(number)
        if snapshot.save.error is None:
            snapshot.save.status = "superseded"

    def _submitted(self, number: int) -> _Lease:
        """Wait until this rank has copied the snapshot that rank 0 announced."""
        while True:
            lease = self._waiting.get(number)
            if lease is not None and (lease.state is LeaseState.QUEUED or interpreter_end.begun()):
                return lease
            with self._arrived:
                self._arrived.wait(_LOOK_AGAIN_S)
            self._control.check()

    def submit(self, lease: _Lease) -> None:
        if interpreter_end.begun() and not self._leads:
            lease.item.save.status = "waiting"
            self._remember(lease)
            self.wait()  # the thread may write it
            if lease.item.save.on_the_way:
                self._write(lease.item)
            self.give_back(lease)
            return
        super().submit(lease)
        with self._arrived:
            self._arrived.notify_all()

    # What memory has of a checkpoint.

    def _committed(self, snapshot: Snapshot[RankContent]) -> Kept | None:
        found = self._committer.persist(snapshot)
        if found is None or snapshot.slot is None:
            return None
        size, file = snapshot.content.size_bytes, found.file
        end = [bytes(view) for view in file.views(size, file.size_bytes)]

        def files(memory: Bytes) -> list[FileImage]:
            return [FileImage.of(file_name, [memory[:size], *end])]

        file_name = file.path
        return Kept(step=snapshot.save.step, serial=found.serial, files=files)
