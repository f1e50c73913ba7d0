"""Checkpointer: saves and restores a training state, in one process or in all ranks of a job."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any, Literal, Self

from iobench.checkpoint.checkpointer import LocalCheckpointer
from iobench.checkpoint.restore import OnCorrupt
from iobench.checkpoint.save import Save
from iobench.checkpoint.snapshot import Content
from iobench.dist.load.any_format import read_any
from iobench.dist.replicas.scheme import Partner, Xor
from iobench.dist.restore_plan import RestoreMode, check_restore_mode
from iobench.dist.world import World
from iobench.errors import OptionError, StateError

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
        writers_per_node: int | Literal["auto"] | None = None,
        deadline_s: float = DEADLINE_S,
        **options: Any,
    ) -> None:
        del world  # see __new__
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

    def _content_of(self, state: Any) -> Content:
        return super()._content_of(_of_one_rank(state))

    def _begin(self, state: Any, step: int) -> tuple[Any, Save]:
        return super()._begin(_of_one_rank(state), step)

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
