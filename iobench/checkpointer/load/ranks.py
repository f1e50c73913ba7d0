"""load_together: all ranks restore the same checkpoint, or none does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from iobench.checkpoint.damage import damage_of
from iobench.checkpoint.load.any_format import read_any
from iobench.checkpoint.load.elsewhere import paths_elsewhere
from iobench.checkpoint.load.reader import PieceReader
from iobench.checkpoint.restore import Loaded, OnCorrupt, candidates, check_not_offloaded
from iobench.checkpoint.store import CheckpointStore
from iobench.errors import DataMismatchError, OptionError, TransferError
from iobench.ranks.together import Together
from iobench.ranks.world import World
from iobench.writers.base import Writer
from iobench.writers.transfer import Transfer

__all__ = ["NextTier", "load_together"]

NextTier = Callable[[int, str], bool]
"""Gets a step and its damage. Makes another place that of the step; False: there is no other.

It is asked again when the step is damaged there too."""


def load_together(
    together: Together,
    world: World,
    store: CheckpointStore,
    writer: Writer,
    step: int | Literal["latest"],
    *,
    on_corrupt: OnCorrupt,
    like: Any,
    known: Mapping[int, int] | None,
    reader: Callable[[], PieceReader],
    next_tier: NextTier | None = None,
) -> tuple[Any, Loaded]:
    """Return the state of the checkpoint that rank 0 chooses; see `Checkpointer.load`.

    `reader` makes what reads one checkpoint for all ranks.
    `next_tier` lets `store` and `writer` read a damaged checkpoint in another place, if it has one.

    Raises DataMismatchError in all ranks for damage that one rank found.
    """
    if on_corrupt not in ("raise", "previous"):
        raise OptionError(f"on_corrupt={on_corrupt!r}: 'raise' or 'previous'")
    leads = world.rank == 0
    _, (steps, *_) = together(
        f"load of step {step}", lambda: candidates(store, step, known) if leads else None
    )
    elsewhere = paths_elsewhere(together, world.rank, like)
    read = partial(read_any, like=like, rank=world.rank, ranks=world.size, elsewhere=elsewhere)
    passed_over: dict[int, str] = {}
    for at, candidate in enumerate(steps):
        restored, damage = _one(together, world, store, writer, candidate, read, reader())
        while damage and next_tier is not None and next_tier(candidate, damage):
            restored, damage = _one(together, world, store, writer, candidate, read, reader())
        if not damage:
            assert restored is not None  # no rank found damage
            state, transfer = restored
            return state, Loaded(step=candidate, transfer=transfer, passed_over=passed_over)
        if on_corrupt == "raise":
            error = DataMismatchError(damage)
            if at + 1 < len(steps):
                error.add_note(
                    f'the checkpoint before it is step {steps[at + 1]}; on_corrupt="previous" '
                    "restores the newest one that is not damaged"
                )
            raise error
        passed_over[candidate] = damage
        warnings.warn(f"step {candidate} is skipped: {damage}", RuntimeWarning, stacklevel=5)
    raise DataMismatchError(f"{store}: every checkpoint is damaged: {passed_over}")


def _one(
    together: Together,
    world: World,
    store: CheckpointStore,
    writer: Writer,
    step: int,
    read_one: Callable[..., tuple[Any, Transfer]],
    reader: PieceReader,
) -> tuple[tuple[Any, Transfer] | None, str]:
    """Restore one checkpoint. Return the result, and the damage that any rank found, or ""."""

    def read() -> tuple[list[Any], tuple[Any, Transfer] | None]:
        try:
            if world.rank:
                store.steps()  # a bucket must be listed to know where a checkpoint is
            manifest = store.manifest(step)
            check_not_offloaded(manifest, str(store))
            restored = read_one(store, writer, step, manifest, reader=reader)
        except (DataMismatchError, TransferError) as error:
            damage = damage_of(error, store.locate(step))
            if damage is None:
                raise
            return [str(damage), None], None
        finally:
            reader.finish()
        return ["", [manifest.serial, manifest.created_s]], restored

    (_, restored), found = together(f"restore of step {step}", read, lambda both: both[0])
    for rank, (damage, _) in enumerate(found):
        if damage:
            return None, f"{damage} (found by rank {rank})"
    if any(one != found[0] for one in found):
        return None, f"{store}: the ranks see different checkpoints of step {step}"
    return restored, ""
