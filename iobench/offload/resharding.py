"""reshard: the state of another number of ranks, read and written anew for this one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from iobench.dist.agreed import agreed
from iobench.errors import DataMismatchError, TargetError
from iobench.offload.agreement import GenerationOffer, chosen, offered_records
from iobench.offload.algorithms import AdamW
from iobench.offload.files import read_layout
from iobench.offload.groups import put_values, specs_of
from iobench.offload.held_pins import found_pins
from iobench.offload.layout import StateLayout
from iobench.offload.old_state import OldSlots, OldState, replace_state
from iobench.offload.rank_directories import (
    complete_sizes,
    directories,
    forget_size,
    note_size,
    noted_size,
    rank_directory,
    records_in,
)
from iobench.offload.record import StateName
from iobench.offload.record_areas import read_records

if TYPE_CHECKING:
    from iobench.offload.ranked import ShardedAdamW

__all__ = ["convert", "remove_size", "reshard", "sources_of_pins", "verify"]


def reshard(
    optimizer: ShardedAdamW,
    directory: Path,
    wanted: int | Literal["latest", "pinned"],
    options: dict[str, Any],
) -> AdamW:
    """Return this rank's AdamW, with the state that all old ranks have.

    Raises TargetError when there is none, StateMismatchError for another model. Files of the old
    ranks are removed when the new state is durable in all ranks, unless checkpoints need them.
    """

    def together(phase: str, work: Any) -> list[Any]:
        return agreed(
            optimizer._control, f"offload {phase}", work, deadline_s=optimizer._deadline_s
        )

    size, leads = optimizer._world.size, optimizer._world.rank == 0
    old_size, name, pins = together("old state", lambda: _choice(directory, size, wanted))[0]
    history = optimizer._new_history()
    own = optimizer._own_directory(directory)
    made: list[AdamW] = []

    def begin() -> None:
        if leads:  # a conversion that is killed is begun again
            note_size(directory, old_size, pins)

    def fill() -> None:
        sources = sources_of_pins(directory, pins) if pins else _at(directory, old_size, name)
        put_values(optimizer.param_groups, sources[0].record.groups)

        def make() -> AdamW:
            made.append(_opened(optimizer, own, sources[0].layout, options))
            return made[0]

        convert(optimizer, sources, make, history)

    def end() -> None:
        if leads:
            note_size(directory, size)
            _remove_unpinned(directory, size)

    try:
        together("begin of conversion", begin)
        together("conversion", fill)
        together("end of conversion", end)
    except BaseException:
        for one in made:
            one.close()
        raise
    return made[0]


def _opened(
    optimizer: ShardedAdamW, own: Path, like: StateLayout, options: dict[str, Any]
) -> AdamW:
    """Return an AdamW on the directory `own`, whose held pins stay; a new one has pins `like`."""
    if found_pins(own, records_in(own)):
        return AdamW.resume(optimizer._shards(), own, **options)
    shutil.rmtree(own, ignore_errors=True)  # of a conversion that did not end, or older
    pins: dict[str, Any] = {"pins": like.pins, "clone_pins": like.clones}
    return AdamW(optimizer._shards(), own, **pins, **options)


def convert(
    optimizer: ShardedAdamW,
    sources: Sequence[OldSlots],
    local: Callable[[], AdamW],
    history: str,
) -> None:
    """Write the state of `sources` as the next generation of `local`, and to the parameters.

    It begins `history`, and is durable on return. Raises DataMismatchError for damage,
    StateMismatchError for another model.
    """
    made = local()
    made._begin_history(history)
    replace_state(made, sources, specs_of(optimizer.param_groups), optimizer._own)


def verify(optimizer: ShardedAdamW, sources: Sequence[OldSlots]) -> None:
    """Read what this rank needs of `sources`. Raises DataMismatchError for damage."""
    reader = OldState(sources, specs_of(optimizer.param_groups), optimizer._own[0][0])
    for wanted, _ in optimizer._own:
        for _ in reader.take(wanted):
            pass


def _remove_unpinned(directory: Path, size: int) -> None:
    """Remove the parts of other numbers of ranks, unless checkpoints may need them."""
    for other in directories(directory):
        first = directory / rank_directory(0, other)
        if other != size and not found_pins(first, records_in(first)):
            remove_size(directory, other)
    if set(directories(directory)) <= {size}:
        forget_size(directory)


def remove_size(directory: Path, size: int) -> None:
    """Remove the parts of `size` ranks. That of rank 0, which has the list of pins, goes last."""
    for rank in reversed(range(size)):
        shutil.rmtree(directory / rank_directory(rank, size), ignore_errors=True)


def _choice(
    directory: Path, size: int, wanted: int | Literal["latest", "pinned"]
) -> tuple[int, StateName, tuple[str, ...]]:
    """Return the old number of ranks, the name and the held pins of the state to convert."""
    noted = noted_size(directory)
    if noted is not None and noted.pins and wanted == "latest":
        return noted.size, StateName("", 0), noted.pins
    best: list[tuple[int, int, StateName]] = []
    for count in complete_sizes(directory):
        if count != (noted.size if noted else count) or count == size:
            continue
        paths = [directory / rank_directory(rank, count) for rank in range(count)]
        offers = [GenerationOffer.of(read_records(path, read_layout(path))) for path in paths]
        found = chosen(offers, wanted, str(directory))
        if found is not None:
            best.append((found[0].updates, count, found[0]))
    if not best:
        raise TargetError(
            f"{directory}: holds no state that all ranks of a job have; make one with "
            "ShardedAdamW(parameters, directory)"
        )
    _, count, name = max(best)
    return count, name, ()


def _at(directory: Path, count: int, name: Sequence[Any]) -> list[OldSlots]:
    found = []
    for rank in range(count):
        path = directory / rank_directory(rank, count)
        records = offered_records(records_in(path))
        record = next(r for r in records if r.name == tuple(name))
        found.append(OldSlots(path, read_layout(path), record))
    return found


def sources_of_pins(directory: Path, pins: Sequence[str]) -> list[OldSlots]:
    """Return the parts of the state with these held pins, one for each of its ranks.

    Raises DataMismatchError when one is not there.
    """
    found = []
    for rank, name in enumerate(pins):
        path = directory / rank_directory(rank, len(pins))
        records = records_in(path)
        generations = [
            pin.generation for pin in (records[0].pins if records else ()) if pin.extra == name
        ]
        record = next((r for r in records if r.generation in generations and not r.damaged), None)
        if record is None:
            raise DataMismatchError(f"{path}: that generation is not pinned here, or is damaged")
        found.append(OldSlots(path, read_layout(path), record))
    return found
