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
    *("NOWHERE", "ROW", "GenerationRecord", "Pin", "StateName"),
    *("area_bytes", "empty_rows", "with_pin"),
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
_JSON_BYTES_PER_GROUP = 4 << 10
_JSON_BYTES_PER_PIN = 256


class Pin(NamedTuple):
    """A generation that is kept: a checkpoint. `step` is the trainer's own number."""

    generation: int
    step: int
    extra: str | None
    """XXH3 of the file with the values that the trainer added; None without any."""
    held: bool = False
    """Whether it stays until it is released: a Checkpointer's manifest names it."""


class StateName(NamedTuple):
    """What names one state: equal names in the ranks of a job are parts of the same state."""

    history: str
    """The random name of a start of the training, which all of its ranks agree on: each resume and
    each load begins a new one. "" in records of older versions."""
    updates: int
    """Calls of `step`, which only grow in one history."""


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
    pins: tuple[Pin, ...] = ()
    damaged: bool = False
    """Whether bytes of it were found that differ from their checksums."""
    time_s: float = 0.0
    """Seconds since the epoch at the commit."""
    elapsed_s: float = 0.0
    """Seconds from the first chunk of the generation until its chunks were durable."""
    history: str = ""
    """See StateName."""
    tentative: bool = False
    """Whether it counts only if all ranks have it, and the generation before is still needed."""

    @property
    def name(self) -> StateName:
        """What all ranks call this state."""
        return StateName(self.history, self.updates)

    def encode(self, capacity_bytes: int) -> bytes:
        """Return the bytes of the record, padded to whole blocks.

        Raises ValueError when they exceed `capacity_bytes`.
        """
        text = json.dumps(
            {
                "sequence": self.sequence,
                "generation": self.generation,
                "updates": self.updates,
                "groups": [dict(group) for group in self.groups],
                "pins": [list(pin) for pin in self.pins],
                "damaged": self.damaged,
                "time_s": self.time_s,
                "elapsed_s": self.elapsed_s,
                "history": self.history,
                "tentative": self.tentative,
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
        """Return the record; None for an area without one, a torn or a damaged one."""
        if len(data) < _HEAD.size:
            return None
        magic, version, text_bytes, body_bytes, digest = _HEAD.unpack_from(data)
        body = data[_HEAD.size : _HEAD.size + body_bytes]
        rows_end = text_bytes + layout.chunks * ROW.itemsize
        if (
            (magic, version) != (_MAGIC, _VERSION)
            or len(body) != rows_end + len(layout.parameters) * _COUNT.itemsize
            or xxhash.xxh3_64_intdigest(body) != digest
        ):
            return None
        found = json.loads(body[:text_bytes])
        return cls(
            sequence=found["sequence"],
            generation=found["generation"],
            updates=found["updates"],
            rows=np.frombuffer(body[text_bytes:rows_end], dtype=ROW).copy(),
            counts=np.frombuffer(body[rows_end:], dtype=_COUNT).astype(np.uint64),
            groups=found["groups"],
            pins=tuple(Pin(*pin) for pin in found["pins"]),
            damaged=found["damaged"],
            time_s=found["time_s"],
            elapsed_s=found["elapsed_s"],
            history=found.get("history", ""),
            tentative=found.get("tentative", False),
        )


def empty_rows(layout: StateLayout) -> npt.NDArray[np.void]:
    """Return rows of chunks that were never written."""
    rows = np.zeros(layout.chunks, dtype=ROW)
    rows["slot"] = NOWHERE
    return rows


def area_bytes(layout: StateLayout) -> int:
    """Return the bytes that are reserved for one record."""
    groups = 1 + max(one.group for one in layout.parameters)
    text = _JSON_BYTES + groups * _JSON_BYTES_PER_GROUP + layout.pins * _JSON_BYTES_PER_PIN
    tables = layout.chunks * ROW.itemsize + len(layout.parameters) * _COUNT.itemsize
    return -(-(_HEAD.size + text + tables) // BLOCK) * BLOCK


def with_pin(pins: Sequence[Pin], new: Pin, most: int) -> tuple[Pin, ...]:
    """Return at most `most` pins with `new` as the last. Held ones stay; of the others those of the
    same step or generation and then the oldest give way. Raises UsageError when all are held."""
    found = [
        pin
        for pin in pins
        if pin.held or new.held or (pin.step != new.step and pin.generation != new.generation)
    ]
    while len(found) >= most:
        oldest = next((pin for pin in found if not pin.held), None)
        if oldest is None:
            raise UsageError(f"all {most} pins belong to checkpoints of a Checkpointer")
        found.remove(oldest)
    return (*found, new)
