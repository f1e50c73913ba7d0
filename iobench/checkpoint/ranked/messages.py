"""What the ranks send each other about the save that is written: parts, orders and endings.

`Turns` are the orders as the persister of one rank sees them.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import xxhash

from iobench.checkpoint.manifest import FileRecord, Manifest
from iobench.errors import DataMismatchError
from iobench.ranks.control import Control
from iobench.writers.blocks import interpreter_end
from iobench.writers.blocks.channel import Lease, LeaseState
from iobench.writers.image import FileImage


def part_file(rank: int) -> str:
    """Return the name of a rank's part manifest."""
    return f"part-{rank}.json"


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file of one rank with the checksums of its pieces: the tensors, then the `values`.

    Those are the paths of plain values in the state. `skeleton` is that of this rank; None if it is
    that of rank 0, except for `own`, this rank's values of each PerRank.
    """

    rank: int
    file: FileRecord
    values: tuple[tuple[str | int, ...], ...]
    skeleton: Any
    own: list[Any]

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def parse(cls, text: bytes, checksum: str, where: str) -> Part:
        """Return the part in `text`. Raises DataMismatchError unless its XXH3-64 is `checksum`."""
        if xxhash.xxh3_64_hexdigest(text) != checksum:
            raise DataMismatchError(f"{where}: differs from what its rank wrote")
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise DataMismatchError(f"{where}: not the part of a checkpoint ({error})") from error


class Order(NamedTuple):
    """What rank 0 announced: which save is written next, and where.

    `remote`: its directory is in the remote tier, where each rank may write for `limit_s`. `failed`
    has the errors of ranks: the save has failed before it had a directory. `gone` are the numbers
    of saves that are dropped.
    """

    number: int
    step: int
    directory: str = ""
    serial: int = 0
    remote: bool = False
    limit_s: float | None = None
    failed: dict[str, str] | None = None
    gone: Sequence[int] = ()

    @property
    def attempt(self) -> str:
        """The random name of the hidden directory: no other save has it."""
        return os.path.basename(self.directory.rstrip("/"))


class Ending(NamedTuple):
    """What rank 0 says at the end of a save. `failed` has the errors of ranks; without, it exists.

    `again`: it is written to another place, with an order of its own. `probe`: bytes that each rank
    writes to the local tier now, to measure it.
    """

    failed: dict[str, str] | None = None
    again: bool = False
    probe: int = 0


class Committed(NamedTuple):
    """What this rank has written of a checkpoint: its file, which is in memory still.

    `manifest` is that of a job of one rank.
    """

    serial: int
    file: FileImage
    manifest: Manifest | None = None


class VoteError(Exception):
    """Ranks voted against a commit; `failed` maps them to their errors.

    `of_place`: all of them failed to write to this place, so another one may do.
    """

    def __init__(self, failed: dict[str, str], *, of_place: bool) -> None:
        super().__init__("; ".join(f"rank {rank}: {text}" for rank, text in failed.items()))
        self.failed, self.of_place = failed, of_place


def shown(failure: BaseException) -> str:
    """Return an error as text, for other ranks."""
    return f"{type(failure).__name__}: {failure}"


_LOOK_AGAIN_S = 0.05
_ENDED = (LeaseState.DONE, LeaseState.FAILED, LeaseState.LOST)


class Turns:
    """Which snapshot all ranks write next, as the persister of one rank sees it.

    All ranks have the same snapshots, by number. Rank 0 announces the one that it writes next, and
    those that it has dropped. The thread of another rank holds its oldest snapshot, waits for the
    order, and writes the snapshot that it names in its place: `announced` returns this order.
    """

    def __init__(self, ranks: Control, announced: Callable[[], Order]) -> None:
        self.leads, self.announced, self._ranks = ranks.leads, announced, ranks
        self._waiting: dict[int, Lease[Any]] = {}
        self._dropped, self._gone = set[int](), deque[int]()
        self._arrived = threading.Condition()

    def agreed(self, work: Callable[[], Any]) -> list[Any]:
        """Return the results of `work` in all ranks. An error is raised in all of them."""
        return self._ranks.agreed("memory", work)

    # Rank 0.

    def lost(self, number: int) -> None:
        """Record that a snapshot is not written. The other ranks hear of it from rank 0."""
        if self.leads:
            self._gone.append(number)

    def newly_gone(self) -> list[int]:
        """Return the numbers of the snapshots that were dropped since the last call."""
        return [self._gone.popleft() for _ in range(len(self._gone))]

    # All ranks.

    def decided(self, reserve: Callable[[], bool], drop: Callable[[int], None]) -> bool:
        """Return whether `reserve` found a slot in rank 0, the only one that calls it.

        The other ranks `drop` what rank 0 has dropped for it. An error is raised in all of them.
        """

        def decide() -> dict[str, Any]:
            return {"taken": reserve(), "gone": list(self._gone)}

        found = self._ranks.led("slot", decide)
        if not self.leads:
            for number in found["gone"]:
                drop(number)
        return bool(found["taken"])

    # The other ranks.

    def remember(self, lease: Lease[Any]) -> None:
        """Record a snapshot of this rank, which rank 0 may announce."""
        left = {n: one for n, one in self._waiting.copy().items() if one.state not in _ENDED}
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
            self._ranks.check()

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
