"""ShardedPins: the pins of a ShardedAdamW that checkpoints of a Checkpointer name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from iobench.checkpoint.manifest import FileRecord, Manifest
from iobench.checkpoint.pinned_state import FoundPin, PinnedGeneration
from iobench.errors import DataMismatchError
from iobench.offload.groups import kept_values, put_values
from iobench.offload.held_pins import HeldPins, found_pins
from iobench.offload.rank_directories import (
    directories,
    forget_size,
    note_size,
    rank_directory,
    records_in,
)
from iobench.offload.resharding import convert, remove_size, sources_of_pins, verify
from iobench.writers.base import Writer

if TYPE_CHECKING:
    from iobench.offload.algorithms import AdamW
    from iobench.offload.ranked import ShardedAdamW

__all__ = ["ShardedPins"]


class ShardedPins:
    """The held pins of this rank's part; `restore` is a call of all ranks. A PinnedState."""

    def __init__(self, optimizer: ShardedAdamW) -> None:
        self._optimizer = optimizer
        self._local = optimizer._running()
        self._pins = HeldPins(self._local)

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
        optimizer = self._optimizer
        local = self._local
        optimizer._local = local  # a failed restore has closed it
        same = len(pinned) == self.ranks
        try:
            damage = self._restore_same(pinned) if same else self._restore_other(pinned)
        except BaseException:
            self._pins.close_failed()
            raise
        if damage:
            self._pins.close_failed()
            raise DataMismatchError(damage)
        put_values(optimizer.param_groups, kept_values(local.param_groups))
        optimizer._unsettled = False
        optimizer._exchange()

    def _restore_same(self, pinned: Sequence[PinnedGeneration]) -> str:
        """Return the damage that any rank found, or ""."""
        rank = self._optimizer._world.rank

        def restore() -> str:
            try:
                self._pins.restore_part(pinned[rank])
            except DataMismatchError as error:
                return str(error)
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
        found: list[str] = [""]

        def fill() -> str:
            try:
                convert(optimizer, sources_of_pins(directory, names), self._reopened)
            except DataMismatchError as error:
                found[0] = str(error)
            return found[0]

        damage = _first(optimizer._agreed("conversion", fill))

        def end() -> None:
            if leads and not damage:
                note_size(directory, self.ranks)

        optimizer._agreed("end of conversion", end)
        return damage

    @property
    def exports(self) -> bool:
        """Not yet: its parts would be files of several ranks."""
        return False

    def export(self, pinned: PinnedGeneration) -> NoReturn:
        """Not supported; see `exports`."""
        raise NotImplementedError

    def open_file(self, pinned: PinnedGeneration, record: FileRecord) -> NoReturn:
        """Not supported; see `exports`."""
        raise NotImplementedError

    def restore_files(self, manifest: Manifest, location: Any, writer: Writer) -> NoReturn:
        """Not supported; see `exports`."""
        raise NotImplementedError

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
