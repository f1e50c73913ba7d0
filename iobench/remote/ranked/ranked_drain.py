"""RankedDrain: the remote tier of a job of several ranks, as one rank has it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from iobench.checkpoint.copies import Copy
from iobench.checkpoint.save import Save
from iobench.checkpoint.store import DirectoryStore
from iobench.ranks.control import Control
from iobench.remote.local_tier import LocalTier
from iobench.remote.ranked.follower import DrainFollower
from iobench.remote.ranked.rank_copier import RankCopier
from iobench.remote.remote import Remote, RemoteTier

__all__ = ["RankedDrain"]

_Agreed = Callable[[str, Callable[[], Any]], list[Any]]


class RankedDrain:
    """Rank 0 has the drain, and decides; in each other rank a thread follows it.

    The methods with `agreed`, which is that of the Checkpointer, are calls of all ranks. They
    answer every rank within `deadline_s` again and again, so that a wait may last longer.
    """

    def __init__(
        self, directory: Path, remote: Remote, control: Control, *, deadline_s: float
    ) -> None:
        """Raises OptionError in all ranks alike."""
        limit, ranks = remote.rate_bytes_per_s, control.world.size
        own = replace(remote, bandwidth_limit=None if limit is None else max(1, limit // ranks))
        self.past_lag, self._round_s = remote.past_lag, deadline_s / 2
        self.tier: LocalTier | None = None
        self._follower: DrainFollower | None = None
        if control.world.rank == 0:
            copier = partial(RankCopier, control=control)
            self.store: DirectoryStore = LocalTier(directory, own, copier)
            assert isinstance(self.store, LocalTier)
            self.tier, self.remote = self.store, self.store.remote
        else:
            self.store, self.remote = DirectoryStore(directory), RemoteTier(own)
            self.remote.check(self.store.directory)
            self._follower = DrainFollower(control, self.store, self.remote)

    def start(self, ages: Callable[[], dict[int, tuple[int, float]]]) -> None:
        """Start the thread. `ages` has those of the ledger of rank 0."""
        if self.tier is not None:
            self.tier.start(ages())
        elif self._follower is not None:
            self._follower.start()

    def tell_of_copies(self, on_durable: Callable[[int], None]) -> None:
        """Call `on_durable` with each step that is durable in the remote tier, in every rank."""
        if self.tier is not None:
            self.tier.drain.queue.on_durable = on_durable
        elif self._follower is not None:
            self._follower.on_durable = on_durable

    def saving(self, step: int, serial: int) -> AbstractContextManager[None]:
        """Let the copies wait while this rank writes its part in the body. In rank 0, all of it."""
        return self._follower.saving(step, serial) if self._follower else nullcontext()

    def sent_directly(self, step: int, serial: int) -> None:
        """Record, in other ranks than 0, a save that is durable in the remote tier alone."""
        if self._follower is not None:
            self._follower.sent_directly(step, serial)

    def copies(self, save: Save) -> list[Copy]:
        """Return where the copies of `save` are, nearest first; in other ranks than 0 as told."""
        if self.tier is not None:
            return self.tier.copies(save)
        assert self._follower is not None
        return self._follower.copies(save)

    def wait_for_lag(self, agreed: _Agreed, step: int) -> float:
        """Let the save of `step` wait while the lag exceeds its limit; return the seconds."""
        if self.past_lag != "wait":
            return 0.0
        waited_s = 0.0
        while True:
            found: float = self._ask(agreed, "lag", lambda tier: self._lag(tier, step))
            waited_s += found
            if found < self._round_s:
                return waited_s

    def _lag(self, tier: LocalTier, step: int) -> float:
        return tier.drain.wait_for_lag(step, self._round_s)

    def wait(self, agreed: _Agreed) -> None:
        """Wait until every checkpoint is durable in the remote tier, or given up.

        An error of an attempt that fails meanwhile is raised in all ranks.
        """
        seen = self._ask(agreed, "remote tier", lambda tier: tier.drain.failures)
        while not self._ask(
            agreed, "wait for copies", lambda tier: tier.drain.wait(seen, self._round_s)
        ):
            pass

    def finish(self, agreed: _Agreed) -> None:
        """Wait like `wait`, but not for a remote tier that fails: a RuntimeWarning in rank 0."""
        while not self._ask(
            agreed, "wait for copies", lambda tier: tier.drain.finish(self._round_s)
        ):
            pass

    def _ask(self, agreed: _Agreed, phase: str, ask: Callable[[LocalTier], Any]) -> Any:
        """Return the answer of rank 0 in all ranks."""
        return agreed(phase, lambda: ask(self.tier) if self.tier is not None else None)[0]

    def stop(self) -> None:
        """End the thread; that of rank 0 ends with its store."""
        if self._follower is not None:
            self._follower.stop()
