"""What is in the files of a state directory.

StateLayout: where each parameter's state is. GenerationRecord: what makes a generation exist: where
each chunk is, and its checksums.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import msgspec
import numpy as np
import xxhash

from iobench.errors import DataMismatchError, StateMismatchError, UsageError, transfer_errors
from iobench.regular_file import read_regular
from iobench.units import MIB

if TYPE_CHECKING:
    import numpy.typing as npt

BLOCK = 4096
"""Bytes. Slots, headers and transfers begin and end at multiples of it (direct I/O)."""
UNIT = BLOCK // 4
"""Elements. Chunks are multiples of it, so that each fp32 tensor of a chunk fills whole blocks."""
ALIGN = 16
"""Elements. Each parameter begins at a multiple of it in the flat state.

torch's fused kernel works on units of 16 fp32 elements (one cache line), and computes the last
elements of a tensor in another way than whole vectors. Pieces of a parameter that begin at
multiples of 16 elements therefore give the same bits as the whole parameter.
"""
DataFile = Literal["state", "parameters"]
DATA_FILES: tuple[DataFile, ...] = get_args(DataFile)
"""The two files with slots."""
ADAM = ("master", "exp_avg", "exp_avg_sq")
"""The fp32 tensors of each parameter."""
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""The dtypes of parameters, with the bytes of an element."""
FORMAT_VERSION = 1
_FORMAT = "iobench offload state"
_DEFAULT_CHUNK = 4 * MIB
_FP32 = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSpec:
    """One parameter of the model: what must match when training goes on."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int
    """The index of its parameter group."""

    @property
    def elements(self) -> int:
        """The number of elements."""
        return prod(self.shape)


class ParameterPiece(NamedTuple):
    """The part of one parameter that is in one chunk."""

    parameter: int
    begin: int
    """First element, in the flat parameter."""
    end: int
    at: int
    """First element, in each fp32 tensor of the chunk."""
    bytes_at: int
    """First byte, in the parameter bytes of the chunk."""


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """The flat state of all parameters, cut into chunks; the files have `slots` places for each.

    The file `state` has one slot for each chunk and slot number: a header of BLOCK bytes, and then
    the fp32 tensors of the chunk one after the other. The file `parameters` has the values that
    the model computes with, in their own dtypes.
    """

    parameters: tuple[ParameterSpec, ...]
    chunk_elements: int
    pins: int
    """How many pinned generations are kept."""
    tensors: tuple[str, ...]
    """Names of the fp32 tensors: ADAM."""

    @property
    def slots(self) -> int:
        """Places of each chunk: the durable generation, the one being written, and the pins."""
        return self.pins + 2

    @functools.cached_property
    def _starts(self) -> list[int]:
        """The first element of each parameter in the flat state, and the end of the last."""
        rounded = (-(-one.elements // ALIGN) * ALIGN for one in self.parameters)
        return [0, *itertools.accumulate(rounded)]

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return -(-self._starts[-1] // self.chunk_elements)

    def elements(self, chunk: int) -> int:
        """Elements of each tensor of `chunk`, a multiple of UNIT: the last chunk may be shorter."""
        left = self._starts[-1] - chunk * self.chunk_elements
        return min(self.chunk_elements, -(-left // UNIT) * UNIT)

    @functools.cached_property
    def _pieces(self) -> list[tuple[ParameterPiece, ...]]:
        return [tuple(self._cut(chunk)) for chunk in range(self.chunks)]

    def pieces(self, chunk: int) -> tuple[ParameterPiece, ...]:
        """The pieces of parameters in `chunk`, in order."""
        return self._pieces[chunk]

    def _cut(self, chunk: int) -> list[ParameterPiece]:
        start = chunk * self.chunk_elements
        stop = start + self.chunk_elements
        index = bisect.bisect_right(self._starts, start) - 1
        found: list[ParameterPiece] = []
        bytes_at = 0
        while index < len(self.parameters) and self._starts[index] < stop:
            first, spec = self._starts[index], self.parameters[index]
            begin, end = max(start - first, 0), min(stop - first, spec.elements)
            if begin < end:
                found.append(ParameterPiece(index, begin, end, first + begin - start, bytes_at))
                size = (end - begin) * DTYPE_BYTES[spec.dtype]
                bytes_at += -(-size // 64) * 64  # aligned for every dtype
            index += 1
        return found

    @functools.cached_property
    def _offsets(self) -> dict[DataFile, list[int]]:
        """Where each chunk begins among the slots of one generation, and the end of the last."""
        state = (
            BLOCK + len(self.tensors) * _FP32 * self.elements(chunk) for chunk in range(self.chunks)
        )
        parameters = (
            -(-(last.bytes_at + self._piece_bytes(last)) // BLOCK) * BLOCK
            for *_, last in self._pieces
        )
        return {
            "state": [0, *itertools.accumulate(state)],
            "parameters": [0, *itertools.accumulate(parameters)],
        }

    def _piece_bytes(self, piece: ParameterPiece) -> int:
        return (piece.end - piece.begin) * DTYPE_BYTES[self.parameters[piece.parameter].dtype]

    def slot_bytes(self, name: DataFile, chunk: int) -> int:
        """Bytes of one slot of `chunk` in this file: in `state` with its header."""
        offsets = self._offsets[name]
        return offsets[chunk + 1] - offsets[chunk]

    def offset(self, name: DataFile, chunk: int, slot: int) -> int:
        """Where the slot begins in this file."""
        offsets = self._offsets[name]
        return slot * offsets[-1] + offsets[chunk]

    def generation_bytes(self, name: DataFile) -> int:
        """Bytes of one slot of all chunks in this file."""
        return self._offsets[name][-1]

    @property
    def buffer_bytes(self) -> int:
        """Bytes of memory that one chunk takes while it is read, updated and written."""
        most = max(self.slot_bytes("parameters", chunk) for chunk in range(self.chunks))
        return self.slot_bytes("state", 0) + most

    def to_json(self) -> str:
        """The text of `layout.json`."""
        return json.dumps({"format": _FORMAT, "version": FORMAT_VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> StateLayout:
        """Parse `layout.json`. Raises UsageError for another format or a newer version,
        DataMismatchError for a damaged file."""
        try:
            found: Any = json.loads(text)
            kind, version = found.pop("format"), found.pop("version")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise DataMismatchError(f"{where}: damaged, not a layout of offload state") from error
        if kind != _FORMAT:
            raise UsageError(f"{where}: not a layout of offload state")
        if version != FORMAT_VERSION:
            raise UsageError(
                f"{where}: format version {version}; this iobench reads {FORMAT_VERSION}. "
                "With the iobench that wrote it, iobench offload export DIRECTORY -o state.pt "
                "makes a file for load_state_dict"
            )
        try:
            layout = msgspec.convert(found, cls)
        except msgspec.ValidationError as error:
            raise DataMismatchError(f"{where}: damaged ({error})") from error
        if layout.tensors != ADAM:
            raise UsageError(
                f"{where}: the state has {', '.join(layout.tensors)}; only that of AdamW and Adam "
                f"can be used: {', '.join(ADAM)}"
            )
        return layout

    def check_same(self, given: Sequence[ParameterSpec], where: str) -> None:
        """Raise StateMismatchError unless `given` are the parameters of this layout, in order.

        Names are compared where both sides have names: a parameter without one is called by its
        index.
        """
        both = _named(self.parameters) and _named(given)

        def keyed(specs: Sequence[ParameterSpec]) -> dict[str, ParameterSpec]:
            return {(one.name if both else str(index)): one for index, one in enumerate(specs)}

        wanted, stored = keyed(given), keyed(self.parameters)
        missing = [name for name in wanted if name not in stored]
        unexpected = [name for name in stored if name not in wanted]
        misshaped = {
            name: (_described(wanted[name]), _described(stored[name]))
            for name in wanted
            if name in stored and _described(wanted[name]) != _described(stored[name])
        }
        if missing or unexpected or misshaped:
            raise StateMismatchError(
                where, missing=missing, unexpected=unexpected, misshaped=misshaped
            )
        if list(wanted) != list(stored):
            raise UsageError(f"{where} has the parameters in another order: {', '.join(stored)}")

    @classmethod
    def plan(
        cls,
        parameters: Sequence[ParameterSpec],
        *,
        pins: int,
        memory_bytes: int,
        chunk_elements: int | None = None,
    ) -> StateLayout:
        """Choose the chunk size: 4 Mi elements, or less so that five buffers fit `memory_bytes`.

        Raises UsageError when not even the smallest chunks fit.
        """
        if not sum(one.elements for one in parameters):
            raise UsageError("the parameters have no elements: there is nothing to optimize")
        if chunk_elements is not None and (chunk_elements < UNIT or chunk_elements % UNIT):
            raise UsageError(f"chunk_elements={chunk_elements}: choose a multiple of {UNIT}")
        each = _FP32 * len(ADAM) + max(DTYPE_BYTES[one.dtype] for one in parameters)
        fitting = (memory_bytes - _GOOD_BUFFERS * 2 * BLOCK) // (_GOOD_BUFFERS * each + _FP32)
        whole = sum(-(-one.elements // ALIGN) * ALIGN for one in parameters)
        elements = chunk_elements or max(
            min(_DEFAULT_CHUNK, fitting // UNIT * UNIT, -(-whole // UNIT) * UNIT), UNIT
        )
        needed = _LEAST_BUFFERS * (2 * BLOCK + each * elements) + _FP32 * elements
        if needed > memory_bytes:
            raise UsageError(
                f"memory={memory_bytes}: too small; chunks of {elements} elements need {needed}"
            )
        return cls(parameters=tuple(parameters), chunk_elements=elements, pins=pins, tensors=ADAM)

    def buffers(self, memory_bytes: int) -> int:
        """How many buffers fit `memory_bytes` next to the gradients of one chunk in fp32."""
        return (memory_bytes - _FP32 * self.chunk_elements) // self.buffer_bytes


_LEAST_BUFFERS = 2
_GOOD_BUFFERS = 5
"""One is read, one is read or loaded, one is updated, two are written."""


def _named(specs: Sequence[ParameterSpec]) -> bool:
    return any(one.name != str(index) for index, one in enumerate(specs))


def _described(spec: ParameterSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)} in group {spec.group}"


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
_IN_TEXT = ("sequence", "generation", "updates", "run", "groups", "pins", "damaged", "time_s")
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
