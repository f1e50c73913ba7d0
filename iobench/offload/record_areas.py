"""RecordAreas: the places of generation records in the file `records`."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from iobench.errors import transfer_errors
from iobench.offload.files import StateFile, areas_of
from iobench.offload.layout import StateLayout
from iobench.offload.record import GenerationRecord, Pin, area_bytes
from iobench.regular_file import read_regular

__all__ = ["RECORDS", "RecordAreas", "read_records", "record_of_pin"]

RECORDS = "records"
"""The file of the records."""


class RecordAreas:
    """The records of an open state directory. One thread writes, any thread may read.

    A torn write leaves an area without a record, and the other areas as they were.
    """

    def __init__(self, file: StateFile, layout: StateLayout) -> None:
        """Read all areas of `file`. Raises TransferError."""
        self._file, self._area_bytes = file, area_bytes(layout)
        self._lock = threading.Lock()
        size = self._area_bytes
        self._areas = [
            GenerationRecord.decode(file.read(size, area * size).tobytes(), layout)
            for area in range(areas_of(layout))
        ]

    def found(self) -> list[GenerationRecord]:
        """Return all valid records, the newest first; also those of damaged generations."""
        with self._lock:
            found = [one for one in self._areas if one is not None]
        return sorted(found, key=lambda one: one.sequence, reverse=True)

    def write(self, record: GenerationRecord, kept: Collection[int]) -> None:
        """Write `record` to an area that has none of the sequence numbers `kept`.

        Durable on return. Raises TransferError, ValueError when it is too large.
        """
        data = record.encode(self._area_bytes)
        area = self._free_area(kept)
        self._put(area, data)
        self._file.sync()
        with self._lock:
            self._areas[area] = record

    def mark_damaged(self, generation: int) -> None:
        """Note durably that bytes of this generation differ from their checksums."""
        with self._lock:
            areas = [
                (n, replace(one, damaged=True))
                for n, one in enumerate(self._areas)
                if one is not None and one.generation == generation
            ]
        for area, marked in areas:
            self._put(area, marked.encode(self._area_bytes))
            with self._lock:
                self._areas[area] = marked
        self._file.sync()

    def _put(self, area: int, data: bytes) -> None:
        self._file.write(data, area * self._area_bytes)

    def _free_area(self, kept: Collection[int]) -> int:
        with self._lock:
            sequences = {n: one.sequence for n, one in enumerate(self._areas) if one is not None}
            free = [n for n in range(len(self._areas)) if sequences.get(n) not in kept]
        return min(free, key=lambda area: sequences.get(area, 0))


def read_records(directory: Path, layout: StateLayout) -> list[GenerationRecord]:
    """Return the valid records in `directory`, the newest first, without the lock.

    A record that a trainer is just writing counts as missing.
    """
    size = area_bytes(layout)
    path = directory / RECORDS
    with transfer_errors("reading", path):
        data = read_regular(path)
    areas = range(areas_of(layout))
    read = [GenerationRecord.decode(data[n * size : (n + 1) * size], layout) for n in areas]
    return sorted((r for r in read if r is not None), key=lambda r: r.sequence, reverse=True)


def record_of_pin(records: Sequence[GenerationRecord], pin: Pin) -> GenerationRecord | None:
    """Return the record of a pin among `records`, the newest first.

    Its own one, which has the groups at the time of the pin; pins of older versions do not name it.
    """
    same = [one for one in records if one.generation == pin.generation]
    return next((one for one in same if one.sequence == pin.sequence), same[0] if same else None)
