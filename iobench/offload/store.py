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

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from iobench.errors import DataMismatchError, TargetError, UsageError
from iobench.offload.files import (
    LAYOUT,
    Speed,
    StateFile,
    file_sizes,
    make_files,
    read_layout,
)
from iobench.offload.layout import (
    BLOCK,
    NOWHERE,
    RECORDS,
    DataFile,
    GenerationRecord,
    Pin,
    StateLayout,
    area_bytes,
    areas_of,
    check_slot,
    decoded_areas,
    empty_rows,
    newest_first,
    read_records,
    record_of_pin,
    with_pin,
)
from iobench.regular_file import read_regular
from iobench.writers.local.directory_lock import DirectoryLock, lock_directory
from iobench.writers.local.new_file import sync_directory

if TYPE_CHECKING:
    import numpy.typing as npt


class GenerationStore:
    """The durable side of a state directory. One process at a time has it, by a lock.

    One thread calls `free_slot`, `commit` and `pin`. Any thread may read the other members: each
    change is one store, so it finds what was before it or what is after it.
    """

    def __init__(
        self, directory: Path, lock: DirectoryLock, layout: StateLayout, speed: Speed
    ) -> None:
        self.directory, self.layout, self._directory_lock = directory, layout, lock
        self.speed = speed
        self._free: npt.NDArray[np.intp] | None = None
        """A slot of each chunk that no kept generation uses, until those change."""
        self._files: list[StateFile] = []
        try:
            for name, size in file_sizes(layout).items():
                self._files.append(StateFile(directory / name, size))
            self.state, self.parameters, self._records = self._files
            self._area_bytes = area_bytes(layout)
            data = self._records.read(areas_of(layout) * self._area_bytes, 0)
            self._areas = decoded_areas(data.data, layout)
        except BaseException:
            self.close()
            raise
        found = self.records()
        self._sequence = found[0].sequence if found else 0
        self.last_generation = max((one.generation for one in found), default=0)
        """The highest generation number that was ever committed here, as far as is known."""
        damaged = {one.generation for one in found if one.damaged}
        self.pins: tuple[Pin, ...] = tuple(
            pin
            for pin in (found[0].pins if found else ())
            if self._find(pin) and pin.generation not in damaged
        )
        self._base: GenerationRecord | None = None
        self._agreed: GenerationRecord | None = None
        """The generation that all ranks have; None for one process."""
        self.newest = next((one for one in self.records() if not one.damaged), None)
        """The newest durable generation; None before the first commit."""

    @classmethod
    def create(cls, directory: Path, layout: StateLayout, speed: Speed) -> GenerationStore:
        """Make a new state in `directory`. Raises TargetError if it has one, or lacks the space."""
        lock = lock_directory(directory, "optimizer")
        try:
            _check_no_state(directory)
            if (directory / LAYOUT).exists():  # its training ended before its first commit
                (directory / LAYOUT).unlink()
                sync_directory(directory)
            make_files(directory, layout)
            return cls(directory, lock, layout, speed)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def open(cls, directory: Path, speed: Speed = Speed()) -> GenerationStore:  # noqa: B008 -- immutable
        """Open the state in `directory`. Raises TargetError if it has none or is in use."""
        read_layout(directory)  # a directory without a state gets no lock file
        lock = DirectoryLock(directory, "optimizer")
        try:
            return cls(directory, lock, read_layout(directory), speed)
        except BaseException:
            lock.release()
            raise

    def close(self) -> None:
        """Close the files and release the lock. Waits for nothing."""
        files, self._files = self._files, []
        for file in files:
            file.close()
        self._directory_lock.release()

    # What exists.

    def records(self) -> list[GenerationRecord]:
        """Return all valid records, the newest first; also those of damaged generations.

        The slots of all but the newest may have been overwritten, and those of pinned ones not.
        """
        return newest_first(self._areas)

    def record_of(self, pin: Pin) -> GenerationRecord:
        """Return the record of a pinned generation."""
        record = self._find(pin)
        assert record is not None  # commits keep the records of pins
        return record

    def _find(self, pin: Pin) -> GenerationRecord | None:
        return record_of_pin(self.records(), pin)

    def held(self, name: str) -> GenerationRecord | None:
        """Return the record of the held pin with this name; None if there is none yet."""
        for pin in self.pins:
            if pin.name == name:
                return self._find(pin)
        return None

    def replaced_pins(self) -> list[tuple[Pin, GenerationRecord]]:
        """Return the pins of older records that are not kept, and their records, the newest first.
        Their slots may have been overwritten."""
        records = self.records()
        pins = {pin: None for one in records for pin in reversed(one.pins)}
        found = [(pin, record_of_pin(records, pin)) for pin in pins if pin not in self.pins]
        return [(pin, one) for pin, one in found if one is not None and not one.damaged]

    def continue_from(self, record: GenerationRecord) -> None:
        """Let the next generation follow `record`, whose slots are kept until it is durable."""
        self._base, self._free = record, None

    def agree(self) -> None:
        """The newest generation and all pins are durable in all ranks: what was before may go.

        Nothing of the next generation may be in flight.
        """
        self._agreed, self._free = self.newest, None

    def rewind(self, record: GenerationRecord, pins: Collection[Pin]) -> None:
        """Go on from `record`, and keep these `pins`: all that all ranks have. Nothing is written:
        the next commit is of another run, and makes the newer generations here worthless."""
        self.newest, self._base = record, None
        self.pins = tuple(pins)
        self.agree()

    def file(self, name: DataFile) -> StateFile:
        """Return one of the two files with slots."""
        return self.state if name == "state" else self.parameters

    def check_headers(self, record: GenerationRecord) -> None:
        """Raise DataMismatchError unless every chunk of `record` has its slot's header."""
        for chunk, row in enumerate(record.rows):
            slot = int(row["slot"])
            if slot == NOWHERE:
                raise DataMismatchError(f"{self.state.path}: chunk {chunk} was never written")
            header = self.state.read(BLOCK, self.layout.offset("state", chunk, slot))
            check_slot(self.state.path, header.tobytes(), row, chunk)

    # What changes.

    def free_slot(self, chunk: int) -> int:
        """Return a slot of `chunk` that no kept generation uses."""
        if self._free is None:
            used = np.zeros((self.layout.chunks, self.layout.slots), dtype=bool)
            for record in self._kept():
                chunks = np.flatnonzero(record.rows["slot"] != NOWHERE)
                used[chunks, record.rows["slot"][chunks]] = True
            assert not used.all(axis=1).any()
            self._free = used.argmin(axis=1)
        return int(self._free[chunk])

    def _kept(self) -> list[GenerationRecord]:
        kept = [self.record_of(pin) for pin in self.pins]
        more = (self.newest, self._base, self._agreed)
        return kept + [one for one in more if one is not None]

    def commit(self, record: GenerationRecord) -> None:
        """Make a generation durable: all chunks in its rows are written, no write is in flight.

        `record` gets a sequence number, the pins and the time. Raises TransferError: the generation
        may exist or not, and the one before is intact.
        """
        self._directory_lock.check()
        self.state.sync()
        self.parameters.sync()
        record = replace(
            record,
            sequence=self._sequence + 1,
            rows=record.rows.copy(),
            pins=self.pins,
            time_s=time.time(),
        )
        self._write(record)
        self.last_generation = max(self.last_generation, record.generation)

    def pin(
        self,
        pin: Pin,
        extra: bytes,
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        """Keep the newest generation as the checkpoint `pin.step`; durable on return.

        `groups` replace its values of the groups: a scheduler has changed them since its commit.
        The oldest pin, and one with the same step, give way once this one is durable; held ones
        stay until `unpin`.
        """
        newest = self.base
        if newest is None or not self.layout.pins:
            raise UsageError(f"{self.directory}: nothing can be pinned")
        sequence = self._sequence + 1
        pin = pin._replace(generation=newest.generation, sequence=sequence)
        pins = with_pin(self.pins, pin, self.layout.pins)
        self._write(replace(newest, sequence=sequence, pins=pins, groups=groups, extra=extra))
        self.pins, self._free = pins, None

    def unpin(self, names: Collection[str]) -> None:
        """Give up the held pins with these names; durable on return."""
        newest = self.newest
        left = tuple(pin for pin in self.pins if pin.name not in names)
        if newest is None or len(left) == len(self.pins):
            return
        base = self._base
        self._write(replace(newest, sequence=self._sequence + 1, pins=left, extra=b""))
        if base is not None:
            self.continue_from(base)
        self.pins, self._free = left, None

    def _write(self, record: GenerationRecord) -> None:
        """Write `record` durably to an area that has none of a kept generation.

        A torn write leaves that area without a record, and the other areas as they were.
        """
        data, kept = record.encode(self._area_bytes), {one.sequence for one in self._kept()}
        sequences = {n: one.sequence for n, one in enumerate(self._areas) if one is not None}
        free = [n for n in range(len(self._areas)) if sequences.get(n) not in kept]
        area = min(free, key=lambda area: sequences.get(area, 0))
        self._records.write(data, area * self._area_bytes)
        self._records.sync()
        self._areas[area] = self.newest = record
        self._base, self._sequence, self._free = None, record.sequence, None

    def mark_damaged(self, record: GenerationRecord) -> None:
        """Note durably that bytes of this generation differ from their checksums.

        `resume` passes it over from now on. Its bytes stay where they are.
        """
        for area, one in enumerate(self._areas):
            if one is not None and one.generation == record.generation:
                marked = replace(one, damaged=True)
                self._records.write(marked.encode(self._area_bytes), area * self._area_bytes)
                self._areas[area] = marked
        self._records.sync()
        self.pins = tuple(pin for pin in self.pins if pin.generation != record.generation)
        self._base = self._free = None
        self.newest = next((one for one in self.records() if not one.damaged), None)

    @property
    def base(self) -> GenerationRecord | None:
        """The generation that the next one follows."""
        return self._base or self.newest

    def first_rows(self) -> npt.NDArray[np.void]:
        """Return the rows from which the next generation begins."""
        base = self.base
        return empty_rows(self.layout) if base is None else base.rows.copy()


def _check_no_state(directory: Path) -> None:
    """Raise TargetError when `directory` has the state of a training.

    One that ended before its first commit has none.
    """
    if not (directory / LAYOUT).exists():
        return
    if read_records(directory, read_layout(directory)):
        raise TargetError(
            f"{directory}: already holds the state of a training; continue it with "
            "AdamW.resume(parameters, directory), or choose another directory"
        )
    if any(read_regular(directory / RECORDS)):  # of a training, and all of them are damaged
        raise TargetError(
            f"{directory}: holds the state of a training whose records are damaged; choose another "
            "directory, or remove this one"
        )


class FoundGeneration(NamedTuple):
    """One generation that has a record."""

    record: GenerationRecord
    step: int | None
    """The step of its pin."""
    kept: bool
    """Whether it is the newest or pinned: the slots of others may be overwritten at any time."""


def inspect(directory: Path) -> tuple[StateLayout, list[FoundGeneration]]:
    """Return the layout and the generations in `directory`, the newest first.

    A trainer may be at work there.

    Raises TargetError when it holds no state, UsageError for a newer format, TransferError.
    """
    layout = read_layout(directory)
    records = read_records(directory, layout)
    pins = {pin.generation: pin.step for pin in (records[0].pins if records else ())}
    newest = next((one.generation for one in records if not one.damaged), None)
    found: dict[int, FoundGeneration] = {}
    for record in records:
        own = record.generation
        kept = own == newest or own in pins
        found.setdefault(own, FoundGeneration(record, pins.get(own), kept))
    return layout, list(found.values())
