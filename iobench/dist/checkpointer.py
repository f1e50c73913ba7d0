"""Checkpointer: saves and restores a training state, in one process or in all ranks of a job."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from iobench.checkpoint.checkpointer import LocalCheckpointer
from iobench.checkpoint.commit import Committer
from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.restore import Loaded, OnCorrupt
from iobench.checkpoint.retention import Retention
from iobench.checkpoint.save import Save
from iobench.checkpoint.slots import SlotPool
from iobench.checkpoint.snapshot import Content
from iobench.checkpoint.store import CheckpointStore
from iobench.dist.load.any_format import read_any
from iobench.dist.replicas.partner import Partner
from iobench.dist.restore_plan import RestoreMode, check_restore_mode
from iobench.dist.saves.one_rank import of_one_rank
from iobench.dist.world import AnyWorld
from iobench.errors import OptionError, UsageError
from iobench.writers.s3_store.target import is_s3

if TYPE_CHECKING:
    from iobench.dist.remote_copies import RemoteCopies
    from iobench.tiers.given import AnyTier, GivenTiers
    from iobench.tiers.local_tier import LocalTier
    from iobench.tiers.nearest import Nearest
    from iobench.tiers.placement import Placement
    from iobench.tiers.remote import Remote
    from iobench.tiers.snapshot_memory import SnapshotMemory, TierUse

__all__ = ["Checkpointer"]

DEADLINE_S = 1800.0


class Checkpointer(LocalCheckpointer):
    _read = staticmethod(read_any)
    _ranked = False
    _given: GivenTiers | None = None
    _memory: SnapshotMemory | None = None
    _tier: LocalTier | None = None
    _opening: Nearest | None = None

    def __new__(
        cls, *args: Any, world: AnyWorld = "job", offload: Any = None, **options: Any
    ) -> Self:
        """Return the Checkpointer of a rank if the job has several, or that with `offload`."""
        del args, options
        made: Any = cls
        if cls is Checkpointer:
            from iobench.dist.kinds import kind_of_checkpointer  # here: its classes are subclasses

            made = kind_of_checkpointer(world, offload) or cls
        return object.__new__(made)  # type: ignore[no-any-return]  # a subclass

    def __init__(
        self,
        location: str | Path,
        *,
        world: AnyWorld = "job",
        replicate: Partner | None = None,
        writers_per_node: int | None = None,
        deadline_s: float = DEADLINE_S,
        tiers: Sequence[AnyTier] = (),
        placement: Placement | None = None,
        offload: Any = None,
        **options: Any,
    ) -> None:
        """Add to the options of LocalCheckpointer, whose directory is the local tier of `tiers`.

        - `world`: `"job"`, all ranks of the launcher's job, which must all make this call;
          `"alone"`, this process only
        - `tiers`: `[Memory("8GiB"), Remote("s3://bucket/run")]`: snapshots wait in the memory, as
          many as fit it; checkpoints are copied to the remote tier in the background
        - `placement`: lets a save go to the remote tier directly, when that is faster
        - `offload`: an optimizer of iobench.offload, whose state is not written again: each save
          pins it, and `load` lets model and optimizer go on from there
        """
        del world  # see __new__
        if offload is not None:
            raise OptionError("offload: takes iobench.Checkpointer itself, not a subclass")
        if tiers:
            from iobench.tiers.given import GivenTiers

            self._given = GivenTiers.of(tiers)
            self._given.check(location, options, ranked=self._ranked)
        self._remote = self._given.remote if self._given is not None else None
        self._placement = _checked(placement, self._remote)
        if self._remote is not None and self._remote.every_save:
            if options.get("on_full") == "supersede":
                raise OptionError("every_save: on_full='supersede' drops saves; use 'wait'")
            self._in_order = True
        many = writers_per_node
        if many is not None and not (type(many) is int and many > 0):
            raise OptionError(f"writers_per_node={many!r}: 1 or more, or None for all")
        if type(deadline_s) not in (int, float) or not deadline_s > 0:
            raise OptionError(f"deadline_s={deadline_s!r}: seconds, above 0")
        if replicate is not None and not isinstance(replicate, Partner):
            raise OptionError(f"replicate={replicate!r}: takes a value such as iobench.Partner()")
        self._replicate = replicate
        if replicate is not None and not self._ranked:
            warnings.warn(
                "replicate: this job has one rank, so nothing is replicated",
                RuntimeWarning,
                stacklevel=2,
            )
        self._deadline_s, self._writers_per_node = float(deadline_s), many
        super().__init__(location, **options)
        self._start_tier()

    def _start_tier(self) -> None:
        if self._tier is not None:
            self._tier.start(self._ledger.ages())

    def _store_at(self, location: str | Path) -> CheckpointStore:
        if self._remote is None:
            return super()._store_at(location)
        self._writer.check_scheme(location)
        if is_s3(location):
            raise OptionError(f"{location}: with tiers, checkpoints are saved to a directory first")
        return self._open_tier(Path(location), self._remote)

    def _open_tier(self, directory: Path, remote: Remote) -> CheckpointStore:
        from iobench.tiers.local_tier import LocalTier  # here: it takes time to import

        self._tier = LocalTier(directory, remote)
        return self._tier

    def _kept(self, keep: Retention) -> Retention:
        """Return the retention of the local tier, which also keeps what is not copied yet."""
        return keep if self._tier is None else self._tier.keeping(keep)

    def _open(
        self, location: str | Path, keep: Retention, pool: SlotPool, limit: int | None
    ) -> None:
        if self._given is not None:
            keep = self._given.keep or keep
            self._memory = self._given.snapshot_memory()
        try:
            super()._open(location, self._kept(keep), pool, limit)
            if self._memory is not None:
                self._persister = self._memory.open(
                    functools.partial(self._committer.persist, rate_bytes_per_s=limit),
                    ledger=self._ledger,
                    keep=keep,
                    store=self._store,
                    local=self._tier,
                    in_order=self._in_order,
                )
            self._ask_remote()
        except BaseException:
            if self._memory is not None:
                self._memory.pool.close()
            self._store.release()
            raise

    def _ask_remote(self) -> None:
        """Ask the remote tier for its checkpoints; wait if the local tier has none."""
        if self._tier is not None:
            self._opening = self._new_nearest(self._tier)
            self._opening.begin()
            if not self._tier.steps():
                self._settle_opening()

    def _new_committer(self) -> Committer:
        local = super()._new_committer()
        if self._tier is None or self._placement is None:
            return local
        from iobench.tiers.placed import PlacedCommitter

        return PlacedCommitter(
            store=self._store,
            writer=self._writer,
            ledger=self._ledger,
            serials=self._ledger,
            tier=self._tier,
            choice=self._placement,
        )

    def _new_nearest(self, tier: LocalTier) -> Nearest:
        from iobench.tiers.nearest import Nearest

        return Nearest(tier, self._writer, self._read, self._ledger.serials())

    def _nearest(self, tier: LocalTier) -> Nearest:
        """Return the checkpoints of both tiers. New saves count as newer than all of them."""
        self._settle_opening()
        nearest = self._new_nearest(tier)
        nearest.ask()
        self._ledger.seen(nearest.last_serial)
        return nearest

    def _settle_opening(self) -> None:
        """Take notice of the list of the remote tier that was asked for at the start."""
        if self._opening is not None:
            opening, self._opening = self._opening, None
            opening.ask()
            self._ledger.seen(opening.last_serial)

    def _content_of(self, state: Any) -> Content:
        return super()._content_of(of_one_rank(state))

    def _begin(self, state: Any, step: int, *, late: bool = False) -> tuple[Any, Save]:
        tier = self._tier
        waited_s = 0.0
        if tier is not None:
            self._settle_opening()
            waited_s = tier.drain.wait_for_lag(step)
        content, save = super()._begin(of_one_rank(state), step, late=late)
        save.tiers = tier.copies if tier is not None else None
        save.lag_wait_s = waited_s
        if self._memory is not None:
            self._memory.began(save)
        return content, save

    @property
    def memory(self) -> tuple[TierUse, ...]:
        """The use of each memory tier now, fastest first; empty without memory tiers."""
        return self._memory.use() if self._memory is not None else ()

    def wait(self, until: Literal["committed", "remote"] = "committed") -> None:
        """Wait until every save is committed, superseded or failed. Raise what failed.

        With `until="remote"` wait also until every checkpoint is durable in the remote tier or
        superseded. Raises the error of an attempt that fails meanwhile; the copies go on.
        """
        if until not in ("committed", "remote"):
            raise OptionError(f"until={until!r}: 'committed' or 'remote'")
        super().wait()
        if until == "remote":
            if self._remote is None:
                raise UsageError('wait(until="remote") needs tiers=[Remote(...)]')
            self._wait_for_copies()

    def _wait_for_copies(self) -> None:
        assert self._tier is not None
        self._tier.drain.wait()

    @property
    def _is_open(self) -> bool:
        return self._unclosed.alive and os.getpid() == self._pid

    def close(self) -> None:
        """Wait for every save, free the memory, release the lock, and raise the first error.

        With `tiers`, wait also for the copies, unless the remote tier fails: a RuntimeWarning names
        the steps then, and the next Checkpointer of the directory goes on. A second call does
        nothing. When Ctrl-C interrupts the wait, the Checkpointer stays open.
        """
        if self._tier is None or not self._is_open:
            super().close()
            return
        self._finish_copy()
        self._persister.wait()
        try:
            self._tier.drain.finish()
        except Warning:  # a warnings filter raises it
            super().close()
            raise
        super().close()

    def latest(self) -> int | None:
        """Return the step of the checkpoint that was saved last, in any tier; None without one."""
        if self._tier is None or not self._is_open:
            return super().latest()
        return self._nearest(self._tier).newest()

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, of all tiers, in ascending order."""
        return super().steps() if self._tier is None else self._nearest(self._tier).steps()

    def remove(self, step: int) -> None:
        """Remove the checkpoint `step` from all tiers. Waits for saves first.

        UsageError if there is none. With `tiers`, TransferError if the remote tier cannot be asked:
        nothing is removed then.
        """
        if self._memory is not None:
            self._memory.forget(step)
        self._check_usable()
        self._finish_copy()
        self._persister.wait()
        self._remove(step)

    def _remove(self, step: int) -> None:
        tier = self._tier
        self._settle_opening()
        if tier is None or self._ledger.holds(step):
            self._ledger.remove(step)
            return
        if step not in self._nearest(tier).steps():
            raise UsageError(f"there is no checkpoint of step {step}")
        tier.remote.remove(step)
        tier.drain.queue.forget(step)

    def _restore(
        self, step: int | Literal["latest"], on_corrupt: OnCorrupt, like: Any
    ) -> tuple[Any, Loaded]:
        if self._memory is None:
            return self._restore_stored(step, on_corrupt, like)
        found = self._memory.restore(step, self._read, like)
        if found is None:
            state, loaded = self._restore_stored(step, on_corrupt, like)
            return state, self._memory.told(loaded)
        self._ledger.resumed_from(found[1].step)
        return found

    def _restore_stored(
        self, step: int | Literal["latest"], on_corrupt: OnCorrupt, like: Any
    ) -> tuple[Any, Loaded]:
        if self._tier is None:
            return super()._restore(step, on_corrupt, like)
        nearest, self._opening = self._opening or self._new_nearest(self._tier), None
        state, loaded = nearest.restore(
            step, on_corrupt=on_corrupt, like=like, offload=self._restore_offload(nearest)
        )
        self._ledger.seen(nearest.last_serial)
        self._ledger.resumed_from(loaded.step)
        return state, loaded

    def _restore_offload(self, nearest: RemoteCopies | None) -> Callable[[Manifest], None] | None:
        """Return what lets an optimizer go on from a checkpoint; a call of all ranks."""

    def load(
        self,
        step: int | Literal["latest"] = "latest",
        *,
        on_corrupt: OnCorrupt = "raise",
        like: Any = None,
        restore_mode: RestoreMode = "auto",
    ) -> Any:
        """Return the state of the checkpoint `step`, or of the newest one. Waits for saves first.

        Every byte is compared with its checksum. A damaged checkpoint raises DataMismatchError.
        With `on_corrupt="previous"` the newest undamaged checkpoint before it is restored instead,
        with a RuntimeWarning; `loaded` gives its step. `like` is a state of the expected structure:
        a checkpoint of another model raises StateMismatchError, which lists missing, unexpected and
        mis-shaped names. Only its top-level entries are compared. TargetError if there is no such
        checkpoint. Later ones stay until a save of the same step replaces them; from the next save
        on they count as older than all others.

        `restore_mode` of several ranks: with "all" each rank reads what it needs. With "broadcast"
        one of the ranks that need the same bytes reads them and passes them on, with "all-gather"
        each of them reads a part. "auto" measures the three on the first bytes.
        """
        check_restore_mode(restore_mode)
        self._restore_mode = restore_mode
        return super().load(step, on_corrupt=on_corrupt, like=like)


def _checked(placement: Placement | None, remote: Remote | None) -> Placement | None:
    """Return `placement`. Raises OptionError for anything else, and without a remote tier."""
    if placement is not None:
        from iobench.tiers.placement import Placement

        if not isinstance(placement, Placement):
            raise OptionError(f"placement={placement!r}: takes a value such as Placement()")
        if remote is None:
            raise OptionError("placement: needs tiers=[Remote(...)]")
    return placement
