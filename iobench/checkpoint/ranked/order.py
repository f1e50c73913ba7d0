"""What the ranks say to each other about the save that is written: orders and votes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from iobench.checkpoint.manifest import Manifest
from iobench.writers.image import FileImage

__all__ = ["Committed", "Ending", "Order", "VoteError", "shown"]


class Order(NamedTuple):
    """What rank 0 announced: which save is written next, and where.

    `remote`: its directory is in the remote tier, where each rank may write for `limit_s`. `failed`
    has the errors of ranks: the save has failed before it had a directory. `gone` are the numbers
    of saves that are superseded. `spare` is a directory with files of an earlier checkpoint, whose
    space the new ones take over.
    """

    number: int
    step: int
    directory: str = ""
    serial: int = 0
    remote: bool = False
    limit_s: float | None = None
    failed: Mapping[str, str] = MappingProxyType({})
    gone: Sequence[int] = ()
    spare: str = ""

    @property
    def attempt(self) -> str:
        """The random name of the hidden directory: no other save has it."""
        return os.path.basename(self.directory.rstrip("/"))

    def to_json(self) -> dict[str, Any]:
        """Return it as `Order(**...)` takes it."""
        return {**self._asdict(), "failed": dict(self.failed), "gone": list(self.gone)}


class Ending(NamedTuple):
    """What rank 0 says at the end of a save. `failed` has the errors of ranks; empty: it exists.

    `again`: it is written to another place, with an order of its own. `probe`: bytes that each rank
    writes to the local tier now, to measure it.
    """

    failed: Mapping[str, str] = MappingProxyType({})
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
