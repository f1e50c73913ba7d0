"""RankedOffloadCheckpointer: checkpoints of all ranks whose optimizer state stays on storage."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.pinned_state import PinnedState
from iobench.checkpoint.store import DirectoryStore
from iobench.dist.agreed import scattered
from iobench.dist.offloaded import pinned_state, then
from iobench.dist.rank_pins import FollowingPins, LeadingPins
from iobench.dist.ranked import Asked, RankedCheckpointer
from iobench.dist.saves.content import RankContent
from iobench.dist.world import World
from iobench.errors import DataMismatchError, OptionError
from iobench.writers.blocks import interpreter_end

__all__ = ["RankedOffloadCheckpointer"]


class RankedOffloadCheckpointer(RankedCheckpointer):
    """The Checkpointer of several ranks with `offload=ShardedAdamW(...)`.

    Each save pins the part of each rank, and its manifest names all of them. A rank votes for a
    checkpoint only when its part is durable. Rank 0 tells the others which pins are free.
    """

    def __init__(self, location: str | Path, *, offload: Any, **options: Any) -> None:
        size = (options.get("world") or World.detect()).size
        self._offloaded: PinnedState = pinned_state(offload, options, ranks=size)
        if options.get("replicate") is not None:
            raise OptionError("offload: not with replicate; replicas have no optimizer state")
        self._pins: LeadingPins | FollowingPins
        super().__init__(location, **options)
        interpreter_end.at_end(self, RankedOffloadCheckpointer._at_end)
        try:
            own = scattered(self._control, "pins", self._pins.lists, deadline_s=self._deadline_s)
            self._agreed("begin of pins", lambda: self._pins.begin(own))
        except BaseException as error:  # in all ranks
            try:
                super().close()
            except Exception as other:  # noqa: BLE001 -- a rank was lost
                error.add_note(str(other))
            raise

    def _rank_pins(self) -> LeadingPins | FollowingPins:
        if not isinstance(self._store, DirectoryStore):
            raise OptionError(f"offload: {self._store} must be a directory")
        leads = self._world.rank == 0
        self._pins = (
            LeadingPins(self._offloaded, self._store) if leads else FollowingPins(self._offloaded)
        )
        return self._pins

    # Saves.

    def _told(self) -> dict[str, Any]:
        if isinstance(self._pins, LeadingPins):
            self._pins.make_room(self._finish_saves, self._ledger.tidy)
        else:
            self._pins.make_room(self._finish_saves)
        return {**super()._told(), "gone": self._pins.gone()}

    def _ask(self, state: Any, step: int) -> Asked:
        asked = super()._ask(state, step)

        def answer() -> list[Any]:
            every = asked.answer()
            self._pins.told(every[0]["gone"])
            return every

        return asked._replace(answer=answer)

    def _settled(self, asked: Asked) -> RankContent:
        content = super()._settled(asked)
        try:
            self._pins.hold(asked.save)
        except Exception as error:  # noqa: BLE001 -- the commit raises it in all ranks
            asked.save.fail(error)
        return content

    def _finish_saves(self) -> None:
        self._pins.settle()
        self._finish_copy()
        self._persister.wait()

    def wait(self, until: Literal["committed", "remote"] = "committed") -> None:
        """Wait until every save is committed, superseded or failed. Raise what failed."""
        self._check_usable()
        with then(lambda: super(RankedOffloadCheckpointer, self).wait(until)):
            self._pins.settle()

    # Restore and removal.

    def load(self, step: int | Literal["latest"] = "latest", **options: Any) -> Any:
        """Return the state of a checkpoint; model and optimizer go on from its generation.

        Only the parameters are read, in addition to the checkpoint's files, unless another number
        of ranks has saved it. See Checkpointer.load. When nothing can be restored, the optimizer is
        closed.
        """
        self._check_usable()
        self._pins.settle()
        return super().load(step, **options)

    def _restore_offload(self, nearest: object) -> Callable[[Manifest], None]:
        del nearest
        return self._restore_pinned

    def _restore_pinned(self, manifest: Manifest) -> None:
        if not manifest.pinned:
            raise DataMismatchError(
                f"{self._store}: step {manifest.step} was saved without an offloaded optimizer"
            )
        self._offloaded.restore(manifest.pinned)

    def remove(self, step: int) -> None:
        """Remove the checkpoint `step`, in all ranks together, and release its pins."""
        self._check_usable()
        self._pins.settle()
        super().remove(step)
        self._release_together()

    def _release_together(self) -> None:
        self._pins.told(self._agreed("free pins", self._pins.gone)[0])

    def close(self) -> None:
        """Wait for every save and for all ranks, release the pins that none needs, and close.

        The optimizer stays open. See Checkpointer.close.
        """
        if not self._unclosed.alive or os.getpid() != self._pid:
            return
        with then(super().close):

            def finish() -> list[str]:
                self._finish_saves()
                return self._pins.gone()

            self._pins.told(self._agreed("end of saves", finish)[0])

    def _at_end(self) -> None:
        with then(super()._at_end):
            if self._unclosed.alive:
                self._pins.settle()
