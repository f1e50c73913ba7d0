"""TieredSaver: takes the checkpoints of a block with tiers, and says when each tier had them."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from iobench.checkpoint.retention import KeepLast
from iobench.dist.checkpointer import Checkpointer
from iobench.results import TrainSave
from iobench.tiers.file import TiersFile
from iobench.tiers.observed import LOCAL, REMOTE
from iobench.train.arm import Arm
from iobench.train.saver import OurSaver
from iobench.writers.base import Writer

__all__ = ["TieredSaver", "most_lost"]


class TieredSaver(OurSaver):
    """Saves with a Checkpointer that has tiers. The remote tier is emptied at the end."""

    def __init__(self, arm: Arm, tiers: TiersFile, writer: Writer, directory: Path) -> None:
        super().__init__(arm, writer, directory.absolute())
        self._tiers, self._remote = tiers, tiers.remote is not None
        self._stack = ExitStack()

    def _open(self, state: Any) -> Checkpointer:
        slots: dict[str, Any] = {} if self._tiers.memories else {"slots": self._arm.slots or 1}
        with ExitStack() as stack:
            name = f"iobench-train-{secrets.token_hex(4)}"
            options = {**slots, **stack.enter_context(self._tiers.options(name))}
            lazy = self._arm.mode == "lazy"
            tiered = Checkpointer(
                self._directory, writer=self._writer, keep=KeepLast(1), lazy=lazy, **options
            )
            stack.callback(tiered.close)
            tiered.prepare(state, wait=True)
            self._stack = stack.pop_all()
        return tiered

    def saves(self) -> tuple[TrainSave, ...]:
        """Return the result of each save, when all copies are durable."""
        return tuple(
            replace(one, remote_s=times[REMOTE][1] if REMOTE in times else None)
            for one, times in zip(super().saves(), self._times(), strict=True)
        )

    def lost_s(self, since: int) -> dict[str, float]:
        times = self._times()[since:]
        found = {
            tier: most_lost(own[tier] for own in times if tier in own) for tier in (LOCAL, REMOTE)
        }
        return {tier: lost for tier, lost in found.items() if lost is not None}

    def _times(self) -> list[dict[str, tuple[float, float]]]:
        """Return for each save its begin, and the seconds until each tier had it."""
        if self._remote and isinstance(self._opened, Checkpointer):
            self._opened.wait(until="remote")
        found: list[dict[str, tuple[float, float]]] = []
        for save in self._saves:
            own: dict[str, tuple[float, float]] = {}
            copies = save.copies if self._remote else []
            at_s = copies[-1].durable_at_s if copies else None  # the farthest one
            if at_s is not None:
                own[REMOTE] = save.created_s, max(0.0, at_s - save.created_s)
            direct = self._remote and str(self._directory) not in [one.tier for one in copies]
            if save.durable_s is not None and not direct:
                own[LOCAL] = save.created_s, save.durable_s
            found.append(own)
        return found

    def close(self) -> None:
        self._stack.close()


def most_lost(saves: Iterable[tuple[float, float]]) -> float | None:
    """Return the longest time from the begin of the newest durable save to the next durable one.

    `saves` has the begin of each save and the seconds until it was durable. None for fewer than
    two.
    """
    durable = sorted((began_s + after_s, began_s) for began_s, after_s in saves)
    if len(durable) < 2:
        return None
    newest_s, most_s = durable[0][1], 0.0
    for at_s, began_s in durable[1:]:
        most_s, newest_s = max(most_s, at_s - newest_s), max(newest_s, began_s)
    return most_s
