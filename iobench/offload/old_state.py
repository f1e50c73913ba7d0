"""OldState: fp32 tensors in parts of other sizes, and the update that writes them to a state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from iobench.errors import DataMismatchError, StateMismatchError
from iobench.offload.buffers import ChunkBuffer
from iobench.offload.clones import PinClones
from iobench.offload.files import StateFile, file_sizes
from iobench.offload.groups import kept_values, put_values
from iobench.offload.layout import BLOCK, ParameterSpec, StateLayout
from iobench.offload.model import flat_view, place
from iobench.offload.ranges import ParameterRange, ranges_of, whole_name
from iobench.offload.record import GenerationRecord
from iobench.offload.slots import check_slot_of, digest_of
from iobench.writers.image import Bytes

if TYPE_CHECKING:
    from iobench.offload.optimizer import OffloadedOptimizer

__all__ = ["OldPart", "OldSlots", "OldState", "Own", "replace_state"]


class OldPart(Protocol):
    """The state of one rank of the old ones, somewhere."""

    @property
    def layout(self) -> StateLayout:
        """Its parameters and chunks."""

    @property
    def updates(self) -> int:
        """Calls of `step` that it includes."""

    @property
    def counts(self) -> Sequence[int]:
        """How often each parameter was updated."""

    @property
    def groups(self) -> Sequence[Mapping[str, Any]]:
        """The values of the groups."""

    @property
    def where(self) -> str:
        """The place, for messages."""

    def chunks(self) -> AbstractContextManager[Callable[[int], Bytes]]:
        """Yield a function that returns the fp32 tensors of a chunk, compared with its checksum.

        Its argument only grows, and a result is valid until the next call.
        """


@dataclass(frozen=True)
class OldSlots:
    """A generation in a state directory. An OldPart."""

    directory: Path
    layout: StateLayout
    record: GenerationRecord

    @property
    def updates(self) -> int:
        """See OldPart."""
        return self.record.updates

    @property
    def counts(self) -> Sequence[int]:
        """See OldPart."""
        return [int(count) for count in self.record.counts]

    @property
    def groups(self) -> Sequence[Mapping[str, Any]]:
        """See OldPart."""
        return self.record.groups

    @property
    def where(self) -> str:
        """See OldPart."""
        return str(self.directory)

    @contextmanager
    def chunks(self) -> Iterator[Callable[[int], Bytes]]:
        """See OldPart."""
        layout, clones = self.layout, PinClones(self.directory, self.layout)
        state = StateFile(self.directory / "state", file_sizes(layout)["state"])

        def read(chunk: int) -> Bytes:
            row = self.record.rows[chunk]
            slot = int(row["slot"])
            with clones.file_of("state", slot, state) as file:
                data = file.read(layout.state_bytes(chunk), layout.offset("state", chunk, slot))
            check_slot_of(file.path, data[:BLOCK].tobytes(), row, chunk)
            if digest_of(data[BLOCK:]) != int(row["state"]):
                raise DataMismatchError(f"{file.path}: chunk {chunk} differs from its checksum")
            return data[BLOCK:]

        try:
            yield read
        finally:
            state.close()


Own = Sequence[tuple[ParameterRange, torch.Tensor]]
"""The ranges of a state, in its order, and the parameters (or parts of them) that they fill."""


def replace_state(
    optimizer: OffloadedOptimizer,
    parts: Sequence[OldPart],
    specs: Sequence[ParameterSpec],
    own: Own,
    *,
    tentative: bool = False,
) -> None:
    """Write the state of `parts` as the next generation of `optimizer`, and to its parameters.

    `specs` are those of all parameters. It is durable on return; `tentative`: see GenerationRecord.
    Raises DataMismatchError for damage, StateMismatchError for another model or other tensors.
    """
    first = parts[0]
    engine = optimizer._running()
    if first.layout.tensors != engine.layout.tensors:
        found, wanted = ", ".join(first.layout.tensors), ", ".join(engine.layout.tensors)
        raise StateMismatchError(
            first.where, missing=[], unexpected=[], misshaped={"tensors": (wanted, found)}
        )
    old = OldState(parts, specs, own[0][0])
    groups = len(optimizer.param_groups), len(first.groups)
    if groups[0] != groups[1]:
        wanted, found = (f"{count} of them" for count in groups)
        misshaped = {"parameter groups": (wanted, found)}
        raise StateMismatchError(first.where, missing=[], unexpected=[], misshaped=misshaped)
    put_values(optimizer.param_groups, first.groups)
    with engine.local() as here:
        here.write_generation(
            _Filling(here.layout, own, old),
            kept_values(optimizer.param_groups),
            old.counts([one.parameter for one, _ in own]),
            first.updates,
            tentative=tentative,
        )
        here.wait()
    optimizer._note_versions()


class OldState:
    """The fp32 tensors of the old ranks in the order of the flat parameters, from one place on."""

    def __init__(
        self, sources: Sequence[OldPart], specs: Sequence[ParameterSpec], first: ParameterRange
    ) -> None:
        """Raises StateMismatchError when `sources` are of another model than `specs`."""
        self._sources = sources
        elements = [one.elements for one in specs]
        self._ranges = ranges_of(elements, len(sources))
        if len(sources) == 1 and len(sources[0].layout.parameters) == len(specs):  # empty ones too
            self._ranges = [[ParameterRange(i, 0, count) for i, count in enumerate(elements)]]
        for source, own in zip(sources, self._ranges, strict=True):
            _check_same(source, own, specs)
        self._pieces = self._read_from((first.parameter, first.begin))
        self._left: tuple[ParameterRange, list[torch.Tensor]] | None = None

    def counts(self, parameters: Sequence[int]) -> Any:
        """Return how often each of `parameters` was updated."""
        known: dict[int, int] = {}
        for source, own in zip(self._sources, self._ranges, strict=True):
            for one, count in zip(own, source.counts, strict=True):
                known[one.parameter] = int(count)
        # Those without elements are in no part.
        return np.array([known.get(one, 0) for one in parameters], dtype=np.uint64)

    def take(self, wanted: ParameterRange) -> Iterator[tuple[ParameterRange, list[torch.Tensor]]]:
        """Yield the tensors of `wanted`, in pieces; calls follow the order of the parameters."""
        at = wanted.begin
        while at < wanted.end:
            piece, tensors = self._left or next(self._pieces)
            self._left = None
            if (piece.parameter, piece.end) <= (wanted.parameter, at):
                continue  # it ends before
            assert piece.parameter == wanted.parameter
            assert piece.begin <= at
            end = min(piece.end, wanted.end)
            part = slice(at - piece.begin, end - piece.begin)
            yield ParameterRange(wanted.parameter, at, end), [one[part] for one in tensors]
            if end < piece.end:
                self._left = piece, tensors
            at = end

    def _read_from(
        self, first: tuple[int, int]
    ) -> Iterator[tuple[ParameterRange, list[torch.Tensor]]]:
        for source, own in zip(self._sources, self._ranges, strict=True):
            if not own or (own[-1].parameter, own[-1].end) <= first:
                continue
            layout = source.layout
            with source.chunks() as read:
                for chunk in range(layout.chunks):
                    pieces = layout.pieces(chunk)
                    last = own[pieces[-1].parameter]
                    if (last.parameter, last.begin + pieces[-1].end) <= first:
                        continue
                    tensors = torch.from_numpy(read(chunk)).view(torch.float32)
                    parts = tensors.split(layout.elements(chunk))
                    for piece in pieces:
                        start = own[piece.parameter]
                        yield (
                            ParameterRange(
                                start.parameter, start.begin + piece.begin, start.begin + piece.end
                            ),
                            [place(piece, part) for part in parts],
                        )


def _check_same(
    source: OldPart, own: Sequence[ParameterRange], specs: Sequence[ParameterSpec]
) -> None:
    """Compare types and sizes, and names where both sides have names."""
    stored = source.layout.parameters
    wanted = [
        (specs[one.parameter].dtype, one.end - one.begin, specs[one.parameter].group) for one in own
    ]
    found = [(one.dtype, one.elements, one.group) for one in stored]
    names = [specs[one.parameter].name for one in own]
    bases = [whole_name(one.name) for one in stored]
    unnamed = [str(one.parameter) for one in own]
    if wanted == found and (names == bases or unnamed in (names, bases)):
        return
    shown = [
        ", ".join(
            f"{name} {dtype} [{size}] in group {group}"
            for name, (dtype, size, group) in zip(one[:3], each[:3], strict=True)
        )
        for one, each in ((names, wanted), (bases, found))
    ]
    raise StateMismatchError(
        source.where,
        missing=[],
        unexpected=[],
        misshaped={"the range of this rank": (shown[0], shown[1])},
    )


class _Filling:
    """Puts the old state into each chunk of the new generation. An Update."""

    def __init__(self, layout: StateLayout, own: Own, old: OldState) -> None:
        self._layout, self._old = layout, old
        self._starts = [one for one, _ in own]
        self._parameters = [parameter for _, parameter in own]

    def __call__(self, buffer: ChunkBuffer) -> bool:
        with torch.no_grad():
            for piece in self._layout.pieces(buffer.chunk):
                start = self._starts[piece.parameter]
                wanted = ParameterRange(
                    start.parameter, start.begin + piece.begin, start.begin + piece.end
                )
                into = [place(piece, tensor) for tensor in buffer.tensors()]
                for part, tensors in self._old.take(wanted):
                    here = slice(part.begin - wanted.begin, part.end - wanted.begin)
                    for own, tensor in zip(into, tensors, strict=True):
                        own[here].copy_(tensor)
                model = flat_view(self._parameters[piece.parameter])[piece.begin : piece.end]
                model.copy_(into[0])  # the masters
                buffer.parameter(piece).copy_(model)
        return True
