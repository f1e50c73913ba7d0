"""ShardedPins: the pins of a ShardedAdamW that checkpoints of a Checkpointer name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iobench.checkpoint.manifest import FileRecord, Manifest
from iobench.checkpoint.pinned_state import FoundPin, PinnedGeneration
from iobench.errors import DataMismatchError
from iobench.offload.exported import ExportedFiles, ExportedState, SlotsFile
from iobench.offload.groups import kept_values, put_values, specs_of
from iobench.offload.held_pins import HeldPins, found_pins, open_slots
from iobench.offload.rank_directories import (
    directories,
    forget_size,
    is_rank_directory,
    note_size,
    noted_size,
    rank_directory,
    records_in,
)
from iobench.offload.resharding import convert, remove_size, sources_of_pins, verify
from iobench.tiers.source_file import LocalDamageError
from iobench.writers.base import Writer
from iobench.writers.image import FileImage

if TYPE_CHECKING:
    from iobench.offload.algorithms import AdamW
    from iobench.offload.ranked import ShardedAdamW

__all__ = ["ShardedPins"]


class ShardedPins:
    """The held pins of this rank's part; `restore` is a call of all ranks. A PinnedState."""

    def __init__(self, optimizer: ShardedAdamW) -> None:
        self._optimizer = optimizer
        self._local = optimizer._running()
        world = optimizer._world
        self._pins = HeldPins(self._local, ExportedFiles(world.rank if world.size > 1 else None))

    @property
    def ranks(self) -> int:
        """How many ranks have a part of the state."""
        return self._optimizer._world.size

    @property
    def most(self) -> int:
        """How many pins there can be. One more is for `ShardedAdamW.pin`."""
        return self._pins.most - 1

    @property
    def closed(self) -> bool:
        """Whether the optimizer is closed."""
        return self._optimizer._local is None or self._pins.closed

    def found(self) -> list[FoundPin]:
        """See HeldPins."""
        return self._pins.found()

    def hold(self, step: int, owner: str) -> str:
        """See HeldPins. The schedulers have set the groups of the whole optimizer."""
        optimizer = self._optimizer
        optimizer._put_groups(optimizer._running())
        return self._pins.hold(step, owner)

    def release(self, names: Collection[str]) -> None:
        """See HeldPins."""
        self._pins.release(names)

    def wait(self) -> None:
        """See HeldPins."""
        self._pins.wait()

    def durable(self, name: str) -> PinnedGeneration:
        """See HeldPins."""
        return self._pins.durable(name)

    def restore(self, pinned: Sequence[PinnedGeneration]) -> None:
        """Let the training of all ranks go on from this generation; fill all parameters.

        A generation of another number of ranks is read from its directories, which all ranks must
        see, and written anew. Raises DataMismatchError in all ranks when a part is damaged or not
        there; the optimizer is closed then.
        """
        self._optimizer._local = self._local  # a failed restore has closed it
        same = len(pinned) == self.ranks
        try:
            damage = self._restore_same(pinned) if same else self._restore_other(pinned)
        except BaseException:
            self._pins.close_failed()
            raise
        if damage:
            self._pins.close_failed()
            raise DataMismatchError(damage)
        self._go_on()

    def _restore_same(self, pinned: Sequence[PinnedGeneration]) -> str:
        """Return the damage that any rank found, or ""."""
        rank, history = self._optimizer._world.rank, self._optimizer._new_history()

        def restore() -> str:
            try:
                self._pins.restore_part(pinned[rank])
            except DataMismatchError as error:
                return str(error)
            self._local._begin_history(history)
            return ""

        damage = _first(self._optimizer._agreed("restore", restore))
        if not damage:  # not before: the ranks need a newest generation in common at any time
            self._optimizer._agreed("abandoned", self._pins.abandon_later)
        return damage

    def _restore_other(self, pinned: Sequence[PinnedGeneration]) -> str:
        optimizer, directory = self._optimizer, self._pins.directory.parent
        leads = optimizer._world.rank == 0
        names = [one.pin for one in pinned]

        def look() -> str:
            try:  # all of it: a conversion that has begun must not find damage
                verify(optimizer, sources_of_pins(directory, names))
            except DataMismatchError as error:
                return str(error)
            return ""

        damage = _first(optimizer._agreed("old state", look))
        if damage:
            return damage

        def begin() -> None:
            if leads:  # a conversion that is killed is begun again by `resume`
                note_size(directory, len(pinned), names)

        optimizer._agreed("begin of conversion", begin)
        history = optimizer._new_history()

        def fill() -> str:
            try:
                convert(optimizer, sources_of_pins(directory, names), self._reopened, history)
            except DataMismatchError as error:
                return str(error)
            return ""

        damage = _first(optimizer._agreed("conversion", fill))

        def end() -> None:
            if leads and not damage:
                note_size(directory, self.ranks)

        optimizer._agreed("end of conversion", end)
        return damage

    def export(self, pinned: PinnedGeneration) -> tuple[PinnedGeneration, FileImage]:
        """See HeldPins. The files of this rank have its number in their names."""
        return self._pins.export(pinned)

    def open_file(self, pinned: PinnedGeneration, record: FileRecord) -> SlotsFile:
        """Open the file of any rank, whose directory this one must see. Raises LocalDamageError."""
        name = Path(pinned.directory).name
        if not is_rank_directory(name):
            raise LocalDamageError(f"{pinned.directory}: not the directory of a rank")
        return open_slots(self._pins.directory.parent / name, pinned, record)

    def restore_files(self, manifest: Manifest, location: Any, writer: Writer) -> None:
        """Go on from the files of a checkpoint at `location`, saved by any number of ranks.

        A call of all ranks. On return the state is durable in all of them. A kill before leaves
        the state that was there. Raises what HeldPins.restore_files raises, and DataMismatchError
        in all ranks; the optimizer is closed then.
        """
        optimizer = self._optimizer
        optimizer._local = self._local  # a failed restore has closed it
        history = optimizer._new_history()

        def fill() -> str:
            try:
                parts = ExportedState.parts(manifest, location, writer)
                self._pins.replace(parts, specs_of(optimizer.param_groups), optimizer._own, history)
            except DataMismatchError as error:
                return str(error)
            return ""

        try:
            damage = _first(optimizer._agreed("read of the copy", fill))
            if damage:
                raise DataMismatchError(damage)
            optimizer._agreed("the copy counts", self._pins.confirm)
            optimizer._agreed("end of the load", self._note_size)
        except BaseException:
            self._pins.close_failed()
            raise
        self._go_on()

    def _note_size(self) -> None:
        """Say that the state is in the directories of this number of ranks, if there are others."""
        directory = self._pins.directory.parent
        alone = set(directories(directory)) == {self.ranks} and noted_size(directory) is None
        if self._optimizer._world.rank == 0 and not alone:
            note_size(directory, self.ranks)

    def _go_on(self) -> None:
        optimizer = self._optimizer
        put_values(optimizer.param_groups, kept_values(self._local.param_groups))
        optimizer._unsettled = False
        optimizer._exchange()

    def _reopened(self) -> AdamW:
        self._pins.reopen()
        return self._local

    def remove_others(self, unused: Callable[[FoundPin], bool]) -> None:
        """Remove the parts of other numbers of ranks whose held pins are all `unused`.

        Rank 0 does it.
        """
        base = self._pins.directory.parent
        if self._optimizer._world.rank:
            return
        for size in directories(base):
            first = base / rank_directory(0, size)
            if size != self.ranks and all(map(unused, found_pins(first, records_in(first)))):
                remove_size(base, size)
        if set(directories(base)) <= {self.ranks}:
            forget_size(base)


def _first(found: Sequence[str]) -> str:
    for rank, damage in enumerate(found):
        if damage:
            return f"{damage} (found by rank {rank})"
    return ""
