"""Checkpointer: saves and restores a training state, in one process or in all ranks of a job."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal, Self

from iobench.checkpoint.checkpointer import LocalCheckpointer
from iobench.checkpoint.restore import OnCorrupt
from iobench.dist.load.any_format import read_any
from iobench.dist.replicas.scheme import Partner, Xor
from iobench.dist.restore_plan import RestoreMode, check_restore_mode
from iobench.dist.world import World
from iobench.errors import OptionError

__all__ = ["Checkpointer"]

DEADLINE_S = 1800.0


class Checkpointer(LocalCheckpointer):

    _read = staticmethod(read_any)
    _ranked = False

    def __new__(cls, *args: Any, world: World | None = None, **options: Any) -> Self:
        """Return the Checkpointer of a rank if the job has several."""
        del args, options
        if cls is Checkpointer and (world or World.detect()).size > 1:
            from iobench.dist.ranked import RankedCheckpointer

            return object.__new__(RankedCheckpointer)  # type: ignore[return-value]  # a subclass
        return object.__new__(cls)

    def __init__(
        self,
        location: str | Path,
        *,
        world: World | None = None,
        replicate: Partner | Xor | None = None,
        failed_restarts: int = 2,
        deadline_s: float = DEADLINE_S,
        **options: Any,
    ) -> None:
        del world  # see __new__
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
        self._deadline_s = float(deadline_s)
        super().__init__(location, **options)

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
