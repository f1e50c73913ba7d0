"""Checkpointer: saves and restores a training state, in one process or in all ranks of a job."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from iobench.checkpoint.checkpointer import LocalCheckpointer
from iobench.checkpoint.commit import Committer
from iobench.checkpoint.restore import Loaded, OnCorrupt
from iobench.checkpoint.retention import Retention
from iobench.checkpoint.save import Save
from iobench.checkpoint.slots import SlotPool
from iobench.checkpoint.snapshot import Content
from iobench.checkpoint.store import CheckpointStore
from iobench.dist.load.any_format import read_any
from iobench.dist.replicas.scheme import Partner, Xor
from iobench.dist.restore_plan import RestoreMode, check_restore_mode
from iobench.dist.world import World
from iobench.errors import OptionError, StateError, UsageError
from iobench.writers.s3_store.target import is_s3

if TYPE_CHECKING:
    from iobench.tiers.local_tier import LocalTier
    from iobench.tiers.nearest import Nearest
    from iobench.tiers.placement import Placement
    from iobench.tiers.remote import Remote

__all__ = ["Checkpointer"]

DEADLINE_S = 1800.0


class Checkpointer(LocalCheckpointer):
    _read = staticmethod(read_any)
    _ranked = False
    _tier: LocalTier | None = None

    def __new__(
        cls, *args: Any, world: World | None = None, offload: Any = None, **options: Any
    ) -> Self:
        """Return the Checkpointer of a rank if the job has several, or that with `offload`."""
        del args, options
        if cls is Checkpointer and (world or World.detect()).size > 1:
            from iobench.dist.ranked import RankedCheckpointer

            return object.__new__(RankedCheckpointer)  # type: ignore[return-value]  # a subclass
        if cls is Checkpointer and offload is not None:
            from iobench.dist.offloaded import OffloadCheckpointer

            return object.__new__(OffloadCheckpointer)  # type: ignore[return-value]  # a subclass
        return object.__new__(cls)

    def __init__(
        self,
        location: str | Path,
        *,
        world: World | None = None,
        replicate: Partner | Xor | None = None,
        failed_restarts: int = 2,
        writers_per_node: int | Literal["auto"] | None = None,
        deadline_s: float = DEADLINE_S,
        tiers: Sequence[Remote] = (),
        placement: Placement | None = None,
        offload: Any = None,
        **options: Any,
    ) -> None:
        """Add to the options of LocalCheckpointer, whose directory is the local tier of `tiers`.

        - `tiers`: `[Remote("s3://bucket/run")]`: checkpoints are copied there in the background
        - `placement`: lets a save go to the remote tier directly, when that is faster
        - `offload`: an optimizer of iobench.offload, whose state is not written again: each save
          pins it, and `load` lets model and optimizer go on from there
        """
        del world  # see __new__
        if offload is not None:
            raise OptionError("offload: not yet for jobs of several ranks")
        self._remote = _remote_of(tiers)
        if self._remote is not None and self._ranked:
            raise OptionError("tiers: not yet for jobs of several ranks; use one rank, or no tiers")
        self._placement = _checked(placement, self._remote)
        many = writers_per_node
        if many not in (None, "auto") and not (type(many) is int and many > 0):
            raise OptionError(f"writers_per_node={many!r}: 1 or more, 'auto', or None for all")
        if type(deadline_s) not in (int, float) or not deadline_s > 0:
            raise OptionError(f"deadline_s={deadline_s!r}: seconds, above 0")
        if replicate is not None and not isinstance(replicate, Partner | Xor):
            raise OptionError(f"replicate={replicate!r}: takes a value such as iobench.Partner()")
        if type(failed_restarts) is not int or failed_restarts < 1:
            raise OptionError(f"failed_restarts={failed_restarts!r}: a whole number, 1 or more")
        self._replicate, self._failed_restarts = replicate, failed_restarts
        if replicate is not None and not self._ranked:
            warnings.warn(
                "replicate: this job has one rank, so nothing is replicated",
                RuntimeWarning,
                stacklevel=2,
            )
        self._deadline_s, self._writers_per_node = float(deadline_s), many
        super().__init__(location, **options)
        if self._tier is not None:
            self._tier.start(self._ledger.ages())

    def _store_at(self, location: str | Path) -> CheckpointStore:
        if self._remote is None:
            return super()._store_at(location)
        self._writer.check_scheme(location)
        if is_s3(location):
            raise OptionError(f"{location}: with tiers, checkpoints are saved to a directory first")
        from iobench.tiers.local_tier import LocalTier  # here: it takes time to import

        self._tier = LocalTier(Path(location), self._remote)
        return self._tier

    def _open(
        self, location: str | Path, keep: Retention, pool: SlotPool, limit: int | None
    ) -> None:
        tier = self._tier
        if tier is None:
            super()._open(location, keep, pool, limit)
            return
        super()._open(location, tier.keeping(keep), pool, limit)
        try:
            self._nearest(tier)
        except BaseException:
            tier.release()
            raise

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

    def _nearest(self, tier: LocalTier) -> Nearest:
        """Return the checkpoints of both tiers. New saves count as newer than all of them."""
        from iobench.tiers.nearest import Nearest

        nearest = Nearest(tier, self._writer, self._read, self._ledger.serials())
        nearest.ask()
        self._ledger.seen(nearest.last_serial)
        return nearest

    def _content_of(self, state: Any) -> Content:
        return super()._content_of(_of_one_rank(state))

    def _begin(self, state: Any, step: int) -> tuple[Any, Save]:
        tier = self._tier
        if tier is not None and tier.remote.options.on_lag == "wait":
            tier.drain.wait_for_lag()
        content, save = super()._begin(_of_one_rank(state), step)
        save.tiers = tier.copies if tier is not None else None
        return content, save

    def wait(self, until: Literal["committed", "remote"] = "committed") -> None:
        """Wait until every save is committed, superseded or failed. Raise what failed.

        With `until="remote"` wait also until every checkpoint is durable in the remote tier, or
        superseded there. Raises the error of an attempt that fails meanwhile; the copies go on in
        the background.
        """
        if until not in ("committed", "remote"):
            raise OptionError(f"until={until!r}: 'committed' or 'remote'")
        super().wait()
        if until == "remote":
            if self._tier is None:
                raise UsageError('wait(until="remote") needs tiers=[Remote(...)]')
            self._tier.drain.wait()

    def close(self) -> None:
        """Wait for every save, free the memory, release the lock, and raise the first error.

        With `tiers`, wait also for the copies, unless the remote tier fails: a RuntimeWarning names
        the steps then, and the next Checkpointer of the directory goes on. A second call does
        nothing. When Ctrl-C interrupts the wait, the Checkpointer stays open.
        """
        if self._tier is None or not self._unclosed.alive or os.getpid() != self._pid:
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
        """Return the step of the checkpoint that was saved last; None when there is none.

        With `tiers`, checkpoints of the remote tier count too.
        """
        if self._tier is None or not self._unclosed.alive or os.getpid() != self._pid:
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
        tier = self._tier
        if tier is None or self._ledger.holds(step):
            super().remove(step)
            return
        self.wait()
        if step not in self._nearest(tier).steps():
            raise UsageError(f"there is no checkpoint of step {step}")
        tier.remote.remove(step)
        tier.drain.queue.forget(step)

    def _restore(
        self, step: int | Literal["latest"], on_corrupt: OnCorrupt, like: Any
    ) -> tuple[Any, Loaded]:
        if self._tier is None:
            return super()._restore(step, on_corrupt, like)
        nearest = self._nearest(self._tier)
        state, loaded = nearest.restore(step, on_corrupt=on_corrupt, like=like)
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
        mis-shaped names. Only the top-level entries of `like` are compared. Raises TargetError when
        there is no such checkpoint. Later checkpoints stay until a save of the same step replaces
        them. From the next save on they count as older than all others.

        `restore_mode` of several ranks: with "all" each rank reads what it needs. With "broadcast"
        one of the ranks that need the same bytes reads them and passes them on, with "all-gather"
        each of them reads a part. "auto" measures the three on the first bytes.
        """
        check_restore_mode(restore_mode)
        self._restore_mode = restore_mode
        return super().load(step, on_corrupt=on_corrupt, like=like)


def _remote_of(tiers: Sequence[Remote]) -> Remote | None:
    """Return the remote tier; None without tiers. Raises OptionError for anything else."""
    if not tiers:
        return None
    from iobench.tiers.remote import Remote

    if not isinstance(tiers, Sequence) or not all(isinstance(one, Remote) for one in tiers):
        raise OptionError(f'tiers={tiers!r}: takes a list such as [Remote("s3://bucket/run")]')
    if len(tiers) > 1:
        raise OptionError(f"tiers: {len(tiers)} remote tiers; one is possible")
    return tiers[0]


def _checked(placement: Placement | None, remote: Remote | None) -> Placement | None:
    """Return `placement`. Raises OptionError for anything else, and without a remote tier."""
    if placement is not None:
        from iobench.tiers.placement import Placement

        if not isinstance(placement, Placement):
            raise OptionError(f"placement={placement!r}: takes a value such as Placement()")
        if remote is None:
            raise OptionError("placement: needs tiers=[Remote(...)]")
    return placement


def _of_one_rank(state: Any) -> Any:
    """Return `state` with plain tensors for DTensors, which in a world of one are whole.

    Raises StateError for one that other ranks hold too.
    """
    if "torch.distributed.tensor" not in sys.modules:  # so no DTensor exists
        return state
    from iobench.dist.saves.local_tree import localized

    found: list[Any] = []
    whole = localized(state, found)
    for tensor in found:
        if tensor is not None and tensor.device_mesh.size() > 1:
            raise StateError(
                f"a DTensor of {list(tensor.shape)} is sharded over {tensor.device_mesh.size()} "
                "ranks, but the Checkpointer is alone: make one in every rank, without `world`"
            )
    return whole
