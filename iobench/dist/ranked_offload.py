"""RankedOffloadCheckpointer: checkpoints of all ranks whose optimizer state stays on storage."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.store import DirectoryStore
from iobench.dist.agreed import scattered
from iobench.dist.pinned_saves import PinnedSaves, pinned_state, then
from iobench.dist.rank_pins import FollowingPins, LeadingPins
from iobench.dist.ranked import Asked, RankedCheckpointer
from iobench.dist.remote_copies import RemoteCopies
from iobench.dist.saves.content import RankContent
from iobench.dist.world import World
from iobench.errors import DataMismatchError, OptionError
from iobench.writers.base import Writer
from iobench.writers.blocks import interpreter_end

__all__ = ["RankedOffloadCheckpointer"]


class RankedOffloadCheckpointer(PinnedSaves, RankedCheckpointer):
    """The Checkpointer of several ranks with `offload=ShardedAdamW(...)`.

    Each save pins the part of each rank, and its manifest names all of them. A rank votes for a
    checkpoint only when its part is durable. Rank 0 tells the others which pins are free.
    """

    _pins: LeadingPins | FollowingPins

    def __init__(self, location: str | Path, *, offload: Any, **options: Any) -> None:
        size = World.of(options.get("world", "job")).size
        self._offloaded = pinned_state(offload, options, ranks=size)
        if options.get("replicate") is not None:
            raise OptionError("offload: not with replicate; replicas have no optimizer state")
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
        drain, state = self._drain, self._offloaded
        if drain is not None:
            drain.copy_pinned(state)
        if self._world.rank == 0:
            self._pins = LeadingPins(state, self._store, exports=drain is not None)
        else:
            self._pins = FollowingPins(state, exports=drain is not None)
        return self._pins

    # Saves.

    def _ask(self, state: Any, step: int) -> Asked:
        self._check_usable()
        # Copies take long: a wait for one may last longer than the ranks wait for each other.
        while self._drain is not None and not self._agreed("room for a pin", self._has_room)[0]:
            pass
        asked = super()._ask(state, step)

        def answer() -> list[Any]:
            every = asked.answer()
            self._pins.told(every[0]["gone"])
            return every

        return asked._replace(answer=answer)

    def _has_room(self) -> bool:
        """Return whether rank 0 has a pin left, or will not get one; see Drain.settle_one."""
        pins = self._pins
        if not isinstance(pins, LeadingPins):
            self._finish_copy()
            return True
        if pins.find_room(self._finish_saves, self._ledger.tidy):
            return True
        assert self._tier is not None
        settled = self._tier.drain.settle_one(self._deadline_s / 2)
        return settled is False or pins.find_room(self._ledger.tidy)

    def _told(self) -> dict[str, Any]:
        if isinstance(self._pins, LeadingPins):
            self._pins.make_room(self._finish_saves, self._ledger.tidy)
        else:
            self._pins.make_room(self._finish_saves)
        return {**super()._told(), "gone": self._pins.gone()}

    def _settled(self, asked: Asked) -> RankContent:
        content = super()._settled(asked)
        try:
            self._pins.hold(asked.save)
        except Exception as error:  # noqa: BLE001 -- the commit raises it in all ranks
            asked.save.fail(error)
        return content

    # Restore and removal.

    def _copy_of(
        self, manifest: Manifest, nearest: RemoteCopies | None
    ) -> tuple[str | Path, Writer] | None:
        found: list[tuple[str | Path, Writer] | None] = []

        def look() -> bool:
            with suppress(DataMismatchError):  # there is no copy then, for all ranks
                found.append(super(RankedOffloadCheckpointer, self)._copy_of(manifest, nearest))
            return bool(found) and found[0] is not None

        phase = f"remote copy of step {manifest.step}"
        return found[0] if all(self._agreed(phase, look)) else None

    def _tell(self, message: str) -> None:
        if self._world.rank == 0:
            super()._tell(message)

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
