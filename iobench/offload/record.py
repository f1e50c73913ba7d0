"""GenerationRecord: what makes a generation exist: where each chunk is, and its checksums."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from iobench.errors import UsageError
from iobench.offload.layout import BLOCK, StateLayout

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = [
    *("NOWHERE", "ROW", "GenerationRecord", "Pin"),
    *("area_bytes", "check_groups", "empty_rows", "with_pin"),
]

ROW = np.dtype(
    [("slot", "<i4"), ("_", "<i4"), ("written", "<u8"), ("state", "<u8"), ("parameters", "<u8")]
)
"""One chunk: its slot, the generation that wrote it, and the XXH3 of its bytes in both files."""
NOWHERE = -1
"""The slot of a chunk that was never written."""


_MAGIC = b"iobgener"
_HEAD = struct.Struct("<8sIIQQ")
"""Magic, version, bytes of the JSON, bytes of the body, XXH3 of the body."""
_VERSION = 1
_COUNT = np.dtype("<u8")
_JSON_BYTES = 16 << 10
_JSON_BYTES_OF_OTHERS = 1 << 10  # all but the groups and the pins
_JSON_BYTES_PER_GROUP = 4 << 10
_JSON_BYTES_PER_PIN = 256


class Pin(NamedTuple):
    """A generation that is kept: a checkpoint."""

    step: int
    """The trainer's own number."""
    name: str = ""
    """Random, in the manifest of a Checkpointer's checkpoint: the pin stays until it is released.
    One without a name gives way to later ones of the trainer."""
    owner: str = ""
    """XXH3 of the name of the Checkpointer's directory: a record has little space for each pin."""
    extra: str | None = None
    """XXH3 of the file with the values that the trainer added; None without any."""
    generation: int = 0
    sequence: int = 0
    """The number of its own record, whose groups are those at the time of the pin."""

    def to_json(self) -> list[Any]:
        """Return the values in their order in a record."""
        held = [self.name, self.owner] if self.name else None
        return [self.generation, self.step, self.extra, held, self.sequence]

    @classmethod
    def of_json(
        cls, generation: int, step: int, extra: str | None, held: Any = None, sequence: int = 0
    ) -> Pin:
        """Return the pin that a record has as these values."""
        if held is True:  # of an older version, where an extra file named it and its owner
            held = (extra or "", "")
        name, owner = held or ("", "")
        return cls(step, name, owner, extra, generation, sequence)


@dataclass(frozen=True, kw_only=True, eq=False)
class GenerationRecord:
    """One commit. The valid record with the highest sequence number is the newest.

    It belongs to one generation, and lists all pinned ones: each of those has its own record.
    """

    sequence: int
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
        text = json.dumps(
            {
                "sequence": self.sequence,
                "generation": self.generation,
                "updates": self.updates,
                "run": self.run,
                "groups": [dict(group) for group in self.groups],
                "pins": [pin.to_json() for pin in self.pins],
                "damaged": self.damaged,
                "time_s": self.time_s,
                "elapsed_s": self.elapsed_s,
            }
        ).encode()
        body = text + self.rows.tobytes() + self.counts.astype(_COUNT).tobytes()
        digest = xxhash.xxh3_64_intdigest(body)
        data = _HEAD.pack(_MAGIC, _VERSION, len(text), len(body), digest) + body
        if len(data) > capacity_bytes:
            raise ValueError(
                f"the values of the parameter groups take {len(text)} bytes as JSON; there is "
                f"room for {capacity_bytes - len(data) + len(text)}"
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
        if magic != _MAGIC or xxhash.xxh3_64_intdigest(body) != digest:
            return None
        if version != _VERSION:
            raise UsageError(
                f"its records have the format version {version}; this iobench reads {_VERSION}. "
                "Install the iobench that wrote them, or a newer one"
            )
        if len(body) != rows_end + len(layout.parameters) * _COUNT.itemsize:
            return None
        found = json.loads(body[:text_bytes])
        return cls(
            sequence=found["sequence"],
            generation=found["generation"],
            updates=found["updates"],
            rows=np.frombuffer(body[text_bytes:rows_end], dtype=ROW).copy(),
            counts=np.frombuffer(body[rows_end:], dtype=_COUNT).astype(np.uint64),
            run=found.get("run", ""),
            groups=found["groups"],
            pins=tuple(Pin.of_json(*pin) for pin in found["pins"]),
            damaged=found["damaged"],
            time_s=found["time_s"],
            elapsed_s=found["elapsed_s"],
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
    return -(-(_HEAD.size + text + tables) // BLOCK) * BLOCK


def check_groups(layout: StateLayout, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise UsageError when a record of this layout has no room for the values of `groups`."""
    most = _JSON_BYTES - _JSON_BYTES_OF_OTHERS + _groups_of(layout) * _JSON_BYTES_PER_GROUP
    size = len(json.dumps([dict(group) for group in groups]))
    if size > most:
        raise UsageError(
            f"the values of the parameter groups take {size} bytes as JSON; there is room for "
            f"{most}"
        )


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
