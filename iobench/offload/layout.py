"""StateLayout: where each parameter's state is in the files of a state directory."""

from __future__ import annotations

import bisect
import functools
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from iobench.errors import DataMismatchError, StateMismatchError, UsageError
from iobench.units import MIB

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
