"""Checkpointer: saves and restores a training state, in one process or in all ranks of a job."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from iobench.checkpoint.checkpointer import LocalCheckpointer
from iobench.checkpoint.commit import Committer, Place
from iobench.checkpoint.events import OnEvent
from iobench.checkpoint.ranked.one_rank import of_one_rank
from iobench.checkpoint.restore import Loaded, OnCorrupt
from iobench.checkpoint.retention import Retention
from iobench.checkpoint.save import Save
from iobench.checkpoint.schedule import Schedule
from iobench.checkpoint.slots import SlotPool
from iobench.checkpoint.snapshot import Content
from iobench.checkpoint.store import CheckpointStore
from iobench.checkpointer.resume import Stateful, expected_of, resume_into
from iobench.errors import OptionError, UsageError
from iobench.ranks.restore_plan import RestoreMode, check_restore_mode
from iobench.ranks.world import AnyWorld, World
from iobench.replicas.partner import Partner
from iobench.writers.base import Writer
from iobench.writers.blocks.channel import OnFull
from iobench.writers.s3_store.target import is_s3

if TYPE_CHECKING:
    from iobench.remote.given import AnyTier, GivenTiers
    from iobench.remote.local_tier import LocalTier
    from iobench.remote.nearest import Nearest
    from iobench.remote.placement import Placement
    from iobench.remote.remote import Remote
    from iobench.remote.snapshot_memory import SnapshotMemory, TierUse

__all__ = ["Checkpointer"]

DEADLINE_S = 1800.0


class Checkpointer(LocalCheckpointer):
    """Saves a training state to `location`, a directory or `s3://bucket/prefix`, and restores it.

        ckpt = Checkpointer("runs/a", keep=KeepLast(3), schedule=Every(500))
        for step, batch in enumerate(data):
            train(batch)
            if ckpt.due(step):
                ckpt.save_async({"model": model.state_dict(), "step": step}, step)
        ckpt.close()

    A checkpoint is the directory `step-N` with `manifest.json` in it. It becomes visible only when
    all of it is durable. Opening a directory removes what a killed process left half written.
    States are nested dicts, lists and tuples of tensors (CPU or CUDA), numpy arrays, numbers,
    strings, bytes and None. They are restored on the CPU.

    - `writer`: the I/O path: a Writer, its name, also with options ("odirect,threads=2"), or the
      path of a TOML file, see `load_writer`
    - `slots`: number of snapshots in host memory, 2 by default. With 1, a save waits until the
      previous one is on storage (CheckFreq). With more, it waits only for its copy (PCcheck). The
      newest waiting snapshot is written next; older ones are dropped and become `superseded`
    - `on_full`: what `save_async` does when no slot is free: "wait", "skip" this save, or
      "supersede" the oldest waiting snapshot
    - `keep`: which checkpoints stay; the others are removed after a newer one is committed
    - `schedule`: decides when `due` returns True
    - `budget`: bytes that all slots together may take (`"16GiB"`)
    - `bandwidth_limit`: bytes per second that background saves may write (`"500MiB"`)
    - `lazy`: `save_async` returns before the copy; `before_optimizer_step` waits for it
    - `reuse_files`: each save writes over the files of the checkpoint that `keep` dropped last
    - `on_event`: called with each Save and what has become of it, from one thread: "copied" (the
      snapshot is complete, nothing is durable), "committed" (durable and visible), "remote"
      (durable in the remote tier, too), "dropped" (superseded or skipped) or "failed". No save
      waits for it; its errors are RuntimeWarnings. `close` waits for its calls, 10 s at most
    - `tiers`: `[Memory("8GiB"), Remote("s3://bucket/run")]`: snapshots wait in the memory, as
      many as fit it; checkpoints are copied to the remote tier in the background. The directory
      `location` is the local tier
    - `placement`: lets a save go to the remote tier directly, when that is faster
    - `offload`: an optimizer of iobench.offload, whose state is not written again: each save
      pins it, and `load` lets model and optimizer go on from there

    In a job of several ranks, the constructor is a call of all of them, and they save together:

    - `world`: "job", all ranks of the launcher's job; "alone", this process only
    - `replicate`: `Partner()`: other nodes keep copies of the snapshots in their memory
    - `writers_per_node`: how many ranks of a node write replicated state; None: all
    - `deadline_s`: how long a rank waits for the others, in seconds

    One Checkpointer at a time can use a directory. TargetError names the pid and host of the
    holder, or a directory that was removed or replaced. Object stores have no locks. A relative
    location is made absolute. What cannot be removed gives a RuntimeWarning.

    Use it from one thread. The next `save`, `save_async`, `wait` or `close` raises an error of the
    background; a failed save never becomes `committed`.
    """

    _given: GivenTiers | None = None
    _memory: SnapshotMemory | None = None
    _tier: LocalTier | None = None
    _opening: Nearest | None = None

    def __init__(
        self,
        location: str | Path,
        *,
        writer: Writer | str = "hybrid",
        slots: int | None = None,
        on_full: OnFull = "wait",
        keep: Retention | None = None,
        schedule: Schedule | None = None,
        budget: int | str | None = None,
        bandwidth_limit: int | str | None = None,
        lazy: bool = False,
        reuse_files: bool = False,
        on_event: OnEvent | None = None,
        tiers: Sequence[AnyTier] = (),
        placement: Placement | None = None,
        offload: Any = None,
        world: AnyWorld = "job",
        replicate: Partner | None = None,
        writers_per_node: int | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """See the class. The constructor of a subclass calls this one with the options."""
        from iobench.checkpointer.kinds import (
            kind_of_checkpointer,  # here: its classes are subclasses
        )

        self.__class__ = kind_of_checkpointer(type(self), world, offload)
        self._set_up(
            location,
            writer=writer,
            slots=slots,
            on_full=on_full,
            keep=keep,
            schedule=schedule,
            budget=budget,
            bandwidth_limit=bandwidth_limit,
            lazy=lazy,
            reuse_files=reuse_files,
            on_event=on_event,
            tiers=tiers,
            placement=placement,
            offload=offload,
            world=world,
            replicate=replicate,
            writers_per_node=writers_per_node,
            deadline_s=deadline_s,
        )

    def _set_up(
        self,
        location: str | Path,
        *,
        slots: int | None,
        tiers: Sequence[AnyTier],
        placement: Placement | None,
        replicate: Partner | None,
        writers_per_node: int | None,
        deadline_s: float,
        world: AnyWorld,
        offload: Any,
        **options: Any,
    ) -> None:
        """Open the location as this kind of Checkpointer."""
        del world, offload  # they have chosen the kind
        if tiers:
            from iobench.remote.given import GivenTiers

            self._given = GivenTiers.of(tiers)
            self._given.check(location, {"slots": slots, **options}, ranked=self._ranked)
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
                stacklevel=3,
            )
        self._deadline_s, self._writers_per_node = float(deadline_s), many
        LocalCheckpointer.__init__(self, location, slots=2 if slots is None else slots, **options)
        if self._tier is not None:
            if self._events is not None:
                self._tier.drain.queue.on_durable = self._events.remote
            self._tier.drain.start(lambda: self._ledger.ages())

    def _store_at(self, location: str | Path) -> CheckpointStore:
        if self._remote is None:
            return super()._store_at(location)
        self._writer.check_scheme(location)
        if is_s3(location):
            raise OptionError(f"{location}: with tiers, checkpoints are saved to a directory first")
        self._tier = self._new_tier(Path(location), self._remote)
        return self._tier

    def _new_tier(self, directory: Path, remote: Remote) -> LocalTier:
        from iobench.remote.local_tier import LocalTier  # here: it takes time to import

        return LocalTier(directory, remote)

    def _kept(self, keep: Retention) -> Retention:
        """Return the retention of the local tier, which also keeps what is not copied yet."""
        return keep if self._tier is None else self._tier.keeping(keep)

    def _open(
        self, location: str | Path, keep: Retention, pool: SlotPool, limit: int | None
    ) -> None:
        if self._given is not None:
            keep = self._given.keep or keep
            self._memory = self._given.snapshot_memory(World.single())
        try:
            super()._open(location, self._kept(keep), pool, limit)
            if self._memory is not None:
                self._persister = self._memory.open(
                    self._committer.persist,
                    ledger=self._ledger,
                    keep=keep,
                    store=self._store,
                    local=self._tier,
                    stored=None if self._tier is None else self._tier.copies,
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

    def _new_committer(self, limit: int | None) -> Committer[Any]:
        committer = super()._new_committer(limit)
        committer.tier = self._tier
        return committer

    def _chooser(self) -> Callable[[Save, Any], Place]:
        """Return what chooses where a save is written."""
        if self._tier is None or self._placement is None:
            return super()._chooser()
        from iobench.remote.placing import Placing

        return Placing(
            self._tier, self._writer, self._ledger, self._placement, shared=self._ranked
        ).place

    def _new_nearest(self, tier: LocalTier) -> Nearest:
        from iobench.remote.nearest import Nearest

        return Nearest(tier, self._writer, self._ledger.serials())

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

    def _begin(self, state: Any, step: int) -> tuple[Any, Save]:
        tier = self._tier
        waited_s = 0.0
        if tier is not None:
            self._settle_opening()
            waited_s = tier.drain.wait_for_lag(step)
        content, save = super()._begin(of_one_rank(state), step)
        save.tiers = tier.copies if tier is not None else None
        save.lag_wait_s = waited_s
        if self._memory is not None:
            self._memory.began(save)
        return content, save

    @property
    def memory(self) -> tuple[TierUse, ...]:
        """The use of each memory tier now, fastest first, of this rank's share; empty without."""
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
        if self._tier is None:
            return super().steps()
        return self._nearest(self._tier).candidates().steps()

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
        if step not in self._nearest(tier).candidates().steps():
            raise UsageError(f"there is no checkpoint of step {step}")
        tier.remote.remove(step)
        tier.drain.queue.forget(step)

    def _restore(
        self, step: int | Literal["latest"], on_corrupt: OnCorrupt, like: Any
    ) -> tuple[Any, Loaded]:
        if self._memory is None:
            return self._restore_stored(step, on_corrupt, like)
        found = self._memory.restore(step, like)
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

    def resume(self, objects: Mapping[str, Stateful], *, on_corrupt: OnCorrupt = "raise") -> int:
        """Load the newest checkpoint into `objects`; return the step to go on with.

            first = ckpt.resume({"model": model, "optimizer": optimizer})
            for step in range(first, steps):

        It is the step after that of the checkpoint, and 0 when there is none yet: the same script
        begins a run and goes on with it. Each object gets `load_state_dict` of the entry that
        `save` had under its name. Modules are compared with the checkpoint before anything is
        loaded. In a job, a call of all ranks. Raises what `load` raises, and StateMismatchError
        for a name that the checkpoint lacks; no object has changed then.
        """
        like = expected_of(objects)
        if self.latest() is None:
            return 0
        state = self.load("latest", on_corrupt=on_corrupt, like=like or None)
        assert self.loaded is not None
        step = self.loaded.step
        resume_into(objects, state, str(self._store.locate(step)))
        return step + 1


def _checked(placement: Placement | None, remote: Remote | None) -> Placement | None:
    """Return `placement`. Raises OptionError for anything else, and without a remote tier."""
    if placement is not None:
        from iobench.remote.placement import Placement

        if not isinstance(placement, Placement):
            raise OptionError(f"placement={placement!r}: takes a value such as Placement()")
        if remote is None:
            raise OptionError("placement: needs tiers=[Remote(...)]")
    return placement
