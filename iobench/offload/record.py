"""GenerationRecord: what makes a generation exist: where each chunk is, and its checksums."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from iobench.errors import DataMismatchError, UsageError, transfer_errors
from iobench.offload.layout import BLOCK, StateLayout
from iobench.regular_file import read_regular

if TYPE_CHECKING:
    import numpy.typing as npt

ROW = np.dtype(
    [("slot", "<i4"), ("_", "<i4"), ("written", "<u8"), ("state", "<u8"), ("parameters", "<u8")]
)
"""One chunk: its slot, the generation that wrote it, and the XXH3 of its bytes in both files."""
NOWHERE = -1
"""The slot of a chunk that was never written."""
RECORDS = "records"
"""The file of the records."""

_SLOT = struct.Struct("<8sIIQQQ")
"""Magic, version, chunk, generation, updates, XXH3 of what follows the header."""
_SLOT_MAGIC, _SLOT_VERSION = b"iobslot\0", 1
_MAGIC = b"iobgener"
_HEAD = struct.Struct("<8sIIQQ")
"""Magic, version, bytes of the JSON, bytes of the body, XXH3 of the body."""
_VERSION = 1
_COUNT = np.dtype("<u8")
_JSON_BYTES = 16 << 10
_JSON_BYTES_OF_OTHERS = 1 << 10  # all but the groups and the pins
_JSON_BYTES_PER_GROUP = 4 << 10
_JSON_BYTES_PER_PIN = 256
_EXTRA_BYTES = 256 << 10
_IN_TEXT = (
    *("sequence", "generation", "updates", "run", "groups", "pins", "damaged"),
    *("time_s", "elapsed_s"),
)
"""The fields of a record that are in its JSON; the others follow it."""


class Pin(NamedTuple):
    """A generation that is kept: a checkpoint."""

    step: int
    """The trainer's own number."""
    name: str = ""
    """Random, in the manifest of a Checkpointer's checkpoint: the pin stays until it is released.
    One without a name gives way to later ones of the trainer."""
    owner: str = ""
    """XXH3 of the name of the Checkpointer's directory: a record has little space for each pin."""
    generation: int = 0
    sequence: int = 0
    """The number of its own record, which has the groups at the time of the pin, and its extra."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GenerationRecord:
    """One commit. The valid record with the highest sequence number is the newest.

    It belongs to one generation, and lists all pinned ones: each of those has its own record.
    """

    sequence: int = 0
    generation: int
    updates: int
    """Calls of `step` that this generation includes."""
    rows: npt.NDArray[np.void]
    counts: npt.NDArray[np.uint64]
    """How often each parameter was updated: Adam's step counter."""
    groups: Sequence[Mapping[str, Any]]
    """The values of each parameter group, such as `lr`."""
    run: str = ""
    """Names the start of the job that made it, the same in all ranks."""
    pins: tuple[Pin, ...] = ()
    extra: bytes = b""
    """What the trainer added to the pin of this record."""
    damaged: bool = False
    """Whether bytes of it were found that differ from their checksums."""
    time_s: float = 0.0
    """Seconds since the epoch at the commit."""
    elapsed_s: float = 0.0
    """Seconds from the first chunk of the generation until its chunks were durable."""

    def encode(self, capacity_bytes: int) -> bytes:
        """Return the bytes of the record, padded to whole blocks.

        Raises ValueError when they exceed `capacity_bytes`.
        """
        text = json.dumps({name: getattr(self, name) for name in _IN_TEXT}).encode()
        body = text + self.rows.tobytes() + self.counts.astype(_COUNT).tobytes() + self.extra
        digest = xxhash.xxh3_64_intdigest(body)
        data = _HEAD.pack(_MAGIC, _VERSION, len(text), len(body), digest) + body
        if len(data) > capacity_bytes:
            raise ValueError(
                f"a record takes {len(data)} bytes, {len(text)} of them for values of the groups; "
                f"there is room for {capacity_bytes}"
            )
        return data + bytes(-len(data) % BLOCK)

    @classmethod
    def decode(cls, data: bytes, layout: StateLayout) -> GenerationRecord | None:
        """Return the record; None for an area without one, a torn or a damaged one.

        Raises UsageError for a record of another version.
        """
        if len(data) < _HEAD.size:
            return None
        magic, version, text_bytes, body_bytes, digest = _HEAD.unpack_from(data)
        body = data[_HEAD.size : _HEAD.size + body_bytes]
        rows_end = text_bytes + layout.chunks * ROW.itemsize
        counts_end = rows_end + len(layout.parameters) * _COUNT.itemsize
        if magic != _MAGIC or xxhash.xxh3_64_intdigest(body) != digest:
            return None
        if version != _VERSION:
            raise UsageError(
                f"its records have the format version {version}; this iobench reads {_VERSION}. "
                "Install the iobench that wrote them, or a newer one"
            )
        if len(body) < counts_end:
            return None
        text = json.loads(body[:text_bytes])
        found = {name: text[name] for name in _IN_TEXT}
        return cls(
            **found | {"pins": tuple(Pin(*pin) for pin in found["pins"])},
            rows=np.frombuffer(body[text_bytes:rows_end], dtype=ROW).copy(),
            counts=np.frombuffer(body[rows_end:counts_end], dtype=_COUNT).astype(np.uint64),
            extra=body[counts_end:],
        )


def slot_header(chunk: int, generation: int, updates: int, digest: int) -> bytes:
    """Return the beginning of a slot's header; the rest of its block is zeros."""
    return _SLOT.pack(_SLOT_MAGIC, _SLOT_VERSION, chunk, generation, updates, digest)


def check_slot(path: Path, header: bytes, row: np.void, chunk: int) -> None:
    """Raise DataMismatchError unless `header` is that of the chunk in `row`."""
    found = _SLOT.unpack_from(header)
    wanted = (_SLOT_MAGIC, _SLOT_VERSION, chunk, int(row["written"]))
    if found[:4] != wanted or found[5] != int(row["state"]):
        raise DataMismatchError(
            f"{path}: the slot of chunk {chunk} is not what generation "
            f"{int(row['written'])} wrote there"
        )


def empty_rows(layout: StateLayout) -> npt.NDArray[np.void]:
    """Return rows of chunks that were never written."""
    rows = np.zeros(layout.chunks, dtype=ROW)
    rows["slot"] = NOWHERE
    return rows


def _groups_of(layout: StateLayout) -> int:
    return 1 + max(one.group for one in layout.parameters)


def area_bytes(layout: StateLayout) -> int:
    """Return the bytes that are reserved for one record."""
    text = (
        _JSON_BYTES + _groups_of(layout) * _JSON_BYTES_PER_GROUP + layout.pins * _JSON_BYTES_PER_PIN
    )
    tables = layout.chunks * ROW.itemsize + len(layout.parameters) * _COUNT.itemsize
    return -(-(_HEAD.size + text + tables + _EXTRA_BYTES) // BLOCK) * BLOCK


def areas_of(layout: StateLayout) -> int:
    """Return the number of places for records: the newest, the pinned, the next, and a spare."""
    return layout.pins + 3


def check_fits(
    layout: StateLayout, groups: Sequence[Mapping[str, Any]], extra: bytes = b""
) -> None:
    """Raise UsageError when a record of this layout has no room for these values."""
    most = _JSON_BYTES - _JSON_BYTES_OF_OTHERS + _groups_of(layout) * _JSON_BYTES_PER_GROUP
    size = len(json.dumps([dict(group) for group in groups]))
    if size > most:
        raise UsageError(
            f"the values of the parameter groups take {size} bytes as JSON; there is room for "
            f"{most}"
        )
    if len(extra) > _EXTRA_BYTES:
        raise UsageError(f"extra takes {len(extra)} bytes; there is room for {_EXTRA_BYTES}")


def with_pin(pins: Sequence[Pin], new: Pin, most: int) -> tuple[Pin, ...]:
    """Return at most `most` pins with `new` as the last. Those with a name stay; of the others that
    of the same step and then the oldest give way. Raises UsageError when all have names."""
    found = [pin for pin in pins if pin.name or new.name or pin.step != new.step]
    while len(found) >= most:
        oldest = next((pin for pin in found if not pin.name), None)
        if oldest is None:
            raise UsageError(f"all {most} pins belong to checkpoints of a Checkpointer")
        found.remove(oldest)
    return (*found, new)


def read_records(directory: Path, layout: StateLayout) -> list[GenerationRecord]:
    """Return the valid records in `directory`, the newest first, without the lock.

    A record that a trainer is just writing counts as missing.
    """
    path = directory / RECORDS
    with transfer_errors("reading", path):
        return newest_first(decoded_areas(memoryview(read_regular(path)), layout))


def decoded_areas(data: memoryview, layout: StateLayout) -> list[GenerationRecord | None]:
    """Return the record in each area of the file; None for an area without a valid one."""
    size = area_bytes(layout)
    areas = (data[n * size : (n + 1) * size] for n in range(areas_of(layout)))
    return [GenerationRecord.decode(bytes(area), layout) for area in areas]


def newest_first(areas: Iterable[GenerationRecord | None]) -> list[GenerationRecord]:
    """Return the records, the newest first."""
    found = (one for one in areas if one is not None)
    return sorted(found, key=lambda one: one.sequence, reverse=True)


def record_of_pin(records: Sequence[GenerationRecord], pin: Pin) -> GenerationRecord | None:
    """Return the record of a pin among `records`, the newest first.

    Its own one, which has the groups at the time of the pin; another one of its generation if that
    is damaged.
    """
    same = [one for one in records if one.generation == pin.generation]
    return next((one for one in same if one.sequence == pin.sequence), same[0] if same else None)
