"""SlotReader: reads slots of one of the two data files, and of its clones."""

from __future__ import annotations

from collections.abc import Callable

from iobench.offload.files import StateFile
from iobench.offload.layout import DataFile
from iobench.offload.mover import Mover
from iobench.offload.store import GenerationStore
from iobench.writers.direct.in_flight import OnComplete
from iobench.writers.image import Bytes

__all__ = ["SlotReader"]


class SlotReader:
    """Starts reads of slots, many pieces in flight. Used by one thread; see Mover."""

    def __init__(
        self, store: GenerationStore, name: DataFile, open_mover: Callable[[StateFile], Mover]
    ) -> None:
        self._store, self._name, self._open_mover = store, name, open_mover
        self._mover = open_mover(store.file(name))
        self._clones: dict[int, tuple[StateFile, Mover]] = {}

    def __len__(self) -> int:
        """Return the number of pieces in flight."""
        found = len(self._mover)
        if self._clones:  # rarely: this is asked for each piece
            found += sum(len(mover) for _, mover in self._clones.values())
        return found

    def start(self, data: Bytes, chunk: int, slot: int, on_complete: OnComplete) -> None:
        """Read the slot of `chunk` into `data`; see `Mover.start`.

        Raises DataMismatchError when the slot is in a clone that is missing.
        """
        layout = self._store.layout
        mover = self._mover if slot < layout.slots else self._clone(slot)
        mover.start(data, layout.offset(self._name, chunk, slot), on_complete)

    def _clone(self, slot: int) -> Mover:
        if slot not in self._clones:
            file = self._store.clones.open(self._name, slot)
            try:
                self._clones[slot] = file, self._open_mover(file)
            except BaseException:
                file.close()
                raise
        return self._clones[slot][1]

    def wait_one(self) -> None:
        """Wait until one piece has ended. Raises like `start`."""
        movers = (mover for _, mover in self._clones.values() if len(mover))
        next(movers, self._mover).wait_one()

    def close_clones(self) -> None:
        """Wait for reads of clones and close them: open files keep their space when removed."""
        while self._clones:
            _, (file, mover) = self._clones.popitem()
            try:
                mover.close()
            finally:
                file.close()

    def close(self) -> None:
        """Wait for all pieces in flight and close everything."""
        try:
            self.close_clones()
        finally:
            self._mover.close()
