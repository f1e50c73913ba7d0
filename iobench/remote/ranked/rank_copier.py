"""RankCopier: rank 0 lets every rank move its share of a checkpoint, and moves its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from iobench.checkpoint.manifest import FileRecord, PinnedGeneration
from iobench.ranks.control import Control
from iobench.remote.file_copier import FileCopier
from iobench.remote.queue import NOT_DURABLE, Queued
from iobench.remote.ranked.messages import (
    NEXT,
    NO_DEADLINE_S,
    REPLY,
    error_of,
    shown_error,
    shown_states,
)
from iobench.remote.ranked.shares import shares

__all__ = ["RankCopier"]


@dataclass(frozen=True, kw_only=True)
class RankCopier(FileCopier):
    """The FileCopier of a job of several ranks, in the drain's thread of rank 0.

    The others do what it asks for in a thread of their own, see DrainFollower. So the rate grows
    with the number of nodes. An error of one rank is an error of the whole call; RankError means
    that a rank is lost, and that no call works any more.
    """

    control: Control
    _told: dict[int, Queued] = field(default_factory=dict)

    def send(
        self,
        step: int,
        serial: int,
        place: str | Path,
        files: Sequence[FileRecord],
        pinned: Sequence[PinnedGeneration] = (),
    ) -> int:
        copy = self.remote.copy(place, serial, self.pace)
        parts = shares(files, self.control.world.size)

        def own() -> int:
            return FileCopier.send(self, step, serial, place, parts[0], pinned)

        order = {"do": "send", "step": step, "serial": serial, "place": str(place)}
        sent = self._together(order, parts, own)
        for part in parts[1:]:
            for file in part:
                copy.check(file.path, file.size_bytes)
        return sent

    def compare_local(
        self, step: int, files: Sequence[FileRecord], pinned: Sequence[PinnedGeneration] = ()
    ) -> None:
        parts = shares(files, self.control.world.size)

        def own() -> int:
            FileCopier.compare_local(self, step, parts[0], pinned)
            return 0

        self._together({"do": "compare", "step": step}, parts, own)

    def read_back(self, where: str | Path, files: Sequence[FileRecord]) -> None:
        parts = shares(files, self.control.world.size)

        def own() -> int:
            FileCopier.read_back(self, where, parts[0])
            return 0

        self._together({"do": "read back", "place": str(where)}, parts, own)

    def tell(self, entries: Sequence[Queued]) -> None:
        now = {one.step: one for one in entries}
        changed = [one for one in entries if self._told.get(one.step) != one]
        gone = [[one.step, one.serial] for one in self._told.values() if one.step not in now]
        if changed or gone:
            self._told.clear()
            self._told.update(now)
            order = {"do": "note", "states": shown_states(changed), "gone": gone}
            self._scatter([order] * self.control.world.size)

    def end(self) -> None:
        self._scatter([{"do": "end"}] * self.control.world.size)

    def _together(
        self, order: dict[str, Any], parts: list[list[FileRecord]], own: Callable[[], int]
    ) -> int:
        """Let all ranks move their parts. Return the bytes sent; raise when all have ended."""
        pieces = order["do"] != "send"  # 100,000 of them are sent only where they are needed
        files = [
            [file if pieces else msgspec.structs.replace(file, pieces=()) for file in part]
            for part in parts
        ]
        order["hurry_after_s"] = self._hurry_after_s()
        self._scatter([{**order, "files": msgspec.to_builtins(part)} for part in files])
        try:
            answer: dict[str, Any] = {"sent": own()}
        except Exception as error:  # noqa: BLE001 -- raised below, when the others have ended
            answer = {"error": shown_error(error)}
            failure: Exception | None = error
        else:
            failure = None
        every = self.control.gather(REPLY, answer, deadline_s=NO_DEADLINE_S)
        failed = {
            f"rank {rank} (host {one['host']})": one["error"]
            for rank, one in enumerate(every)
            if rank and "error" in one
        }
        if failure is not None and not failed:
            raise failure
        worst = error_of({**failed, **({"rank 0": answer["error"]} if failure else {})})
        if worst is not None:
            raise worst from failure
        return sum(one["sent"] for one in every)

    def _hurry_after_s(self) -> float:
        """Return the seconds after which copies no longer wait for saves: at half of the lag."""
        waiting = [one.since_s for one in self._told.values() if one.state in NOT_DURABLE]
        half_s = self.remote.options.max_lag_s / 2
        return min(waiting, default=time.monotonic()) + half_s - time.monotonic()

    def _scatter(self, orders: list[dict[str, Any]]) -> None:
        self.control.scatter(NEXT, orders, deadline_s=NO_DEADLINE_S)
