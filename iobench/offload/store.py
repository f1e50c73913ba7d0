"""GenerationStore: which generations exist, where they are, and what may be overwritten.

The argument for every crash point (docs/decisions/0055):

1. A chunk of the next generation goes to a slot that no kept generation uses. Kept are the newest
   durable generation, the one that training went on from, and all pinned ones.
2. `commit` syncs both data files before it writes the record, and the record goes to an area that
   holds no record of a kept generation. It is durable when its own sync returns. A torn record
   fails its checksum: the one before is still the newest.
3. Only after that sync does the store count the new generation as the newest, so only then are the
   slots of the one before free.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from iobench.checkpoint.lock import DirectoryLock, lock_directory
from iobench.errors import DataMismatchError, TargetError, UsageError
from iobench.offload.clones import PinClones, can_clone
from iobench.offload.files import (
    LAYOUT,
    StateFile,
    file_sizes,
    make_files,
    read_layout,
)
from iobench.offload.layout import BLOCK, DataFile, StateLayout
from iobench.offload.pin_extras import PinExtras
from iobench.offload.record import NOWHERE, GenerationRecord, Pin, empty_rows, with_pin
from iobench.offload.record_areas import RecordAreas, read_records
from iobench.offload.slots import check_slot_of
from iobench.writers.local.new_file import sync_directory

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["GenerationStore", "check_no_state"]


class Lock(Protocol):
    """What a store holds while it is open."""

    def release(self) -> None:
        """Let others have the directory."""


class GenerationStore:
    """The durable side of a state directory. One process at a time has it, by a lock.

    One thread calls `free_slot`, `commit` and `pin`. Any thread may read the other members.
    """

    def __init__(self, directory: Path, lock: Lock, layout: StateLayout) -> None:
        self.directory, self.layout, self._directory_lock = directory, layout, lock
        self._lock = threading.Lock()
        self._extras = PinExtras(directory)
        self.clones = PinClones(directory, layout)
        self._files: list[StateFile] = []
        try:
            for name, size in file_sizes(layout).items():
                self._files.append(StateFile(directory / name, size))
            self.state, self.parameters, records = self._files
            self._records = RecordAreas(records, layout)
        except BaseException:
            self.close()
            raise
        self.pins: tuple[Pin, ...] = ()
        found = self.records()
        self._sequence = found[0].sequence if found else 0
        self.last_generation = max((one.generation for one in found), default=0)
        """The highest generation number that was ever committed here, as far as is known."""
        damaged = {one.generation for one in found if one.damaged}
        self.pins = tuple(
            pin
            for pin in (found[0].pins if found else ())
            if self._find(pin) and pin.generation not in damaged
        )
        self._base: GenerationRecord | None = None
        self._newest = next((one for one in self.records() if not one.damaged), None)

    @classmethod
    def create(cls, directory: Path, layout: StateLayout) -> GenerationStore:
        """Make a new state in `directory`, with slots for pins where nothing can be cloned.

        Raises TargetError if it has one, or lacks the space.
        """
        lock = lock_directory(directory, "optimizer")
        try:
            if layout.clones and not can_clone(directory):
                warnings.warn(
                    f"{directory}: files cannot share blocks here (no reflinks): slots are "
                    f"reserved for {layout.pins} pins",
                    RuntimeWarning,
                    stacklevel=4,
                )
                layout = replace(layout, clones=False)
            check_no_state(directory)
            if (directory / LAYOUT).exists():  # its training ended before its first commit
                (directory / LAYOUT).unlink()
                sync_directory(directory)
            make_files(directory, layout)
            return cls(directory, lock, layout)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def open(cls, directory: Path) -> GenerationStore:
        """Open the state in `directory`. Raises TargetError if it has none or is in use."""
        layout = read_layout(directory)
        lock = DirectoryLock(directory, "optimizer")
        try:
            store = cls(directory, lock, layout)
        except BaseException:
            lock.release()
            raise
        store._remove_unpinned()  # of a process that was killed before its record
        return store

    def close(self) -> None:
        """Close the files and release the lock. Waits for nothing."""
        self._close_files()
        self._directory_lock.release()

    def hand_over(self) -> DirectoryLock:
        """Close the files and return the lock, which the caller releases."""
        assert isinstance(self._directory_lock, DirectoryLock)
        self._close_files()
        return self._directory_lock

    def _close_files(self) -> None:
        files, self._files = self._files, []
        for file in files:
            file.close()

    # What exists.

    @property
    def newest(self) -> GenerationRecord | None:
        """The newest durable generation; None before the first commit."""
        with self._lock:
            return self._newest

    def records(self) -> list[GenerationRecord]:
        """Return all valid records, the newest first; also those of damaged generations.

        The slots of all but the newest may have been overwritten, and those of pinned ones not.
        """
        found = self._records.found()
        if not self.layout.clones:
            return found
        pinned = {pin.generation for pin in self.pins}
        cloned = pinned - {one.generation for one in found[:1]}
        return [self.clones.in_clone(one) if one.generation in cloned else one for one in found]

    def record_of(self, pin: Pin) -> GenerationRecord:
        """Return the record of a pinned generation."""
        record = self._find(pin)
        assert record is not None  # commits keep the records of pins
        return record

    def _find(self, pin: Pin) -> GenerationRecord | None:
        return next((r for r in self.records() if r.generation == pin.generation), None)

    def continue_from_generation(self, generation: int | None) -> None:
        """Like `continue_from`, by number; None: the newest one."""
        for record in self.records():
            if record.generation == generation:
                self.continue_from(record)
                return

    def continue_from(self, record: GenerationRecord) -> None:
        """Let the next generation follow `record`, whose slots are kept until it is durable."""
        with self._lock:
            self._base = record

    def file(self, name: DataFile) -> StateFile:
        """Return one of the two files with slots."""
        return self.state if name == "state" else self.parameters

    def check_slot(self, header: bytes, row: np.void, chunk: int) -> None:
        """Raise DataMismatchError unless `header` is that of the chunk in `row`."""
        check_slot_of(self.state.path, header, row, chunk)

    def check_headers(self, record: GenerationRecord) -> None:
        """Raise DataMismatchError unless every chunk of `record` has its slot's header."""
        files = dict.fromkeys(range(self.layout.slots), self.state)
        try:
            for chunk, row in enumerate(record.rows):
                slot = int(row["slot"])
                if slot == NOWHERE:
                    raise DataMismatchError(f"{self.state.path}: chunk {chunk} was never written")
                if slot not in files:
                    files[slot] = self.clones.open("state", slot)
                header = files[slot].read(BLOCK, self.layout.offset("state", chunk, slot))
                self.check_slot(header.tobytes(), row, chunk)
        finally:
            for slot in files.keys() - range(self.layout.slots):
                files[slot].close()

    # What changes.

    def free_slot(self, chunk: int) -> int:
        """Return a slot of `chunk` that no kept generation uses."""
        used = {int(one.rows[chunk]["slot"]) for one in self._kept()}
        return next(slot for slot in range(self.layout.slots) if slot not in used)

    def _kept(self) -> list[GenerationRecord]:
        kept = [self.record_of(pin) for pin in self.pins]
        before = self._before_tentative()
        with self._lock:
            more = (self._newest, self._base, before)
        return kept + [one for one in more if one is not None]

    def _remove_unpinned(self) -> None:
        """Remove what belongs to pins that were given up."""
        self._extras.remove_others(self.pins)
        if self.layout.clones:
            kept = {self.clones.slot(pin.generation) for pin in self.pins}
            for record in self._kept():  # a chunk that has not changed may still be in a clone
                kept.update(record.rows["slot"].tolist())
            self.clones.remove_others(kept)

    def commit(
        self,
        rows: npt.NDArray[np.void],
        *,
        generation: int,
        updates: int,
        counts: npt.NDArray[np.uint64],
        groups: Sequence[Mapping[str, Any]],
        began_s: float,
        history: str = "",
        tentative: bool = False,
    ) -> GenerationRecord:
        """Make a generation durable: all chunks in `rows` are written, and no write is in flight.

        It was begun at `began_s` of time.monotonic. `history`, `tentative`: see GenerationRecord.
        Raises TransferError: the generation may exist or not, and the one before is intact.
        """
        self.state.sync()
        self.parameters.sync()
        record = GenerationRecord(
            sequence=self._sequence + 1,
            generation=generation,
            updates=updates,
            rows=rows.copy(),
            counts=counts.copy(),
            groups=groups,
            pins=self.pins,
            time_s=time.time(),
            elapsed_s=time.monotonic() - began_s,
            history=history,
            tentative=tentative,
        )
        self._write(record)
        self.last_generation = max(self.last_generation, generation)
        return record

    def pin(
        self,
        step: int,
        extra: bytes | None,
        groups: Sequence[Mapping[str, Any]],
        *,
        held: bool = False,
    ) -> Pin:
        """Keep the newest generation as the checkpoint `step`; durable on return.

        `groups` replace its values of the groups: a scheduler has changed them since its commit.
        The oldest pin, and one with the same step, give way once this one is durable; held ones
        stay until `unpin`.
        """
        newest = self.base
        if newest is None or not self.layout.pins:
            raise UsageError(f"{self.directory}: nothing can be pinned")
        digest = None if extra is None else self._extras.write(extra)
        pin = Pin(newest.generation, step, digest, held)
        pins = with_pin(self.pins, pin, self.layout.pins)
        if self.layout.clones and pin.generation not in {one.generation for one in self.pins}:
            self.clones.make(pin.generation, newest.rows, self.state, self.parameters)
        self._write(replace(newest, sequence=self._sequence + 1, pins=pins, groups=groups))
        self.pins = pins
        self._remove_unpinned()
        return pin

    def adopt(self, record: GenerationRecord) -> None:
        """Let the next generation follow `record` and abandon newer ones; durable on return.

        A tentative generation counts from now on.
        """
        sequence = self._sequence + 1
        self._write(replace(record, sequence=sequence, pins=self.pins, tentative=False))

    def withdraw(self) -> None:
        """Abandon a tentative generation, if the newest one is; durable on return."""
        before = self._before_tentative()
        if before is not None:
            self.adopt(before)

    def _before_tentative(self) -> GenerationRecord | None:
        """The newest generation that counts, if a tentative one is newer."""
        newest = self.newest
        if newest is None or not newest.tentative:
            return None
        return next((one for one in self.records() if not (one.damaged or one.tentative)), None)

    def unpin(self, extras: Collection[str]) -> None:
        """Give up the held pins whose `extra` is one of `extras`; durable on return."""
        newest = self.newest
        left = tuple(pin for pin in self.pins if not (pin.held and pin.extra in extras))
        if newest is None or len(left) == len(self.pins):
            return
        base = self._base
        self._write(replace(newest, sequence=self._sequence + 1, pins=left))
        if base is not None:
            self.continue_from(base)
        self.pins = left
        self._remove_unpinned()

    def _write(self, record: GenerationRecord) -> None:
        self._records.write(record, {one.sequence for one in self._kept()})
        with self._lock:
            self._newest = record
            self._base = None
            self._sequence = record.sequence

    def mark_damaged(self, record: GenerationRecord) -> None:
        """Note durably that bytes of this generation differ from their checksums.

        `resume` passes it over from now on. Its bytes stay where they are.
        """
        self._records.mark_damaged(record.generation)
        self.pins = tuple(pin for pin in self.pins if pin.generation != record.generation)
        with self._lock:
            self._base = None
        left = [one for one in self.records() if not one.damaged]
        with self._lock:
            self._newest = left[0] if left else None

    def extra(self, pin: Pin) -> bytes | None:
        """Return what was added to `pin`. Raises DataMismatchError if it is damaged or missing."""
        return self._extras.read(pin)

    @property
    def base(self) -> GenerationRecord | None:
        """The generation that the next one follows."""
        with self._lock:
            return self._base or self._newest

    def first_rows(self) -> npt.NDArray[np.void]:
        """Return the rows from which the next generation begins."""
        base = self.base
        return empty_rows(self.layout) if base is None else base.rows.copy()


def check_no_state(directory: Path) -> None:
    """Raise TargetError when `directory` has the state of a training.

    One that ended before its first commit, or in the middle of its first load, has none.
    """
    if not (directory / LAYOUT).exists():
        return
    if any(not one.tentative for one in read_records(directory, read_layout(directory))):
        raise TargetError(
            f"{directory}: already holds the state of a training; continue it with "
            "AdamW.resume(parameters, directory), or choose another directory"
        )
