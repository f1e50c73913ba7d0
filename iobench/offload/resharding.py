"""reshard: the state of another number of ranks, read and written anew for this one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from iobench.dist.agreed import agreed
from iobench.errors import DataMismatchError, StateMismatchError, TargetError
from iobench.offload.agreement import GenerationOffer, chosen, kept_records
from iobench.offload.algorithms import AdamW
from iobench.offload.buffers import ChunkBuffer
from iobench.offload.files import StateFile, file_sizes, read_layout
from iobench.offload.groups import kept_values, put_values, specs_of
from iobench.offload.held_pins import found_pins
from iobench.offload.layout import BLOCK, StateLayout
from iobench.offload.model import flat_view, place
from iobench.offload.ranges import ParameterRange, ranges_of
from iobench.offload.rank_directories import (
    complete_sizes,
    directories,
    forget_size,
    note_size,
    noted_size,
    rank_directory,
    records_in,
)
from iobench.offload.record import GenerationRecord
from iobench.offload.slots import check_slot_of, digest_of
from iobench.offload.store import read_records

if TYPE_CHECKING:
    from iobench.offload.ranked import ShardedAdamW

__all__ = ["convert", "remove_size", "reshard", "sources_of_pins", "verify"]


class _Source(NamedTuple):
    """One rank's part of the old state."""

    directory: Path
    layout: StateLayout
    record: GenerationRecord


def reshard(
    optimizer: ShardedAdamW,
    directory: Path,
    wanted: int | Literal["latest", "pinned"],
    options: dict[str, Any],
) -> AdamW:
    """Return this rank's AdamW, with the state that all old ranks have.

    Raises TargetError when there is none, StateMismatchError for another model. Files of the old
    ranks are removed when the new state is durable in all ranks, unless checkpoints need them.
    """

    def together(phase: str, work: Any) -> list[Any]:
        return agreed(
            optimizer._control, f"offload {phase}", work, deadline_s=optimizer._deadline_s
        )

    size, leads = optimizer._world.size, optimizer._world.rank == 0
    old_size, updates, pins = together("old state", lambda: _choice(directory, size, wanted))[0]
    own = optimizer._own_directory(directory)
    made: list[AdamW] = []

    def begin() -> None:
        if leads:  # a conversion that is killed is begun again
            note_size(directory, old_size, pins)

    def fill() -> None:
        sources = sources_of_pins(directory, pins) if pins else _at(directory, old_size, updates)
        put_values(optimizer.param_groups, sources[0].record.groups)

        def make() -> AdamW:
            made.append(_opened(optimizer, own, sources[0].layout.pins, options))
            return made[0]

        convert(optimizer, sources, make)

    def end() -> None:
        if leads:
            note_size(directory, size)
            _remove_unpinned(directory, size)

    try:
        together("begin of conversion", begin)
        together("conversion", fill)
        together("end of conversion", end)
    except BaseException:
        for one in made:
            one.close()
        raise
    return made[0]


def _opened(optimizer: ShardedAdamW, own: Path, pins: int, options: dict[str, Any]) -> AdamW:
    """Return an AdamW on the directory `own`, whose held pins stay."""
    if found_pins(own, records_in(own)):
        return AdamW.resume(optimizer._shards(), own, **options)
    shutil.rmtree(own, ignore_errors=True)  # of a conversion that did not end, or older
    return AdamW(optimizer._shards(), own, pins=pins, **options)


def convert(
    optimizer: ShardedAdamW, sources: Sequence[_Source], local: Callable[[], AdamW]
) -> None:
    """Write the state of `sources` as the next generation of `local`, and to the parameters.

    It is durable on return. Raises DataMismatchError for damage, StateMismatchError for another
    model; nothing is written then.
    """
    record = sources[0].record
    made = local()
    reader = _OldState(sources, specs_of(optimizer.param_groups), optimizer._own[0][0])
    put_values(made.param_groups, record.groups)
    with made._running().local() as engine:
        engine.write_generation(
            _Filling(engine.layout, [p for _, p in optimizer._own], optimizer._own, reader),
            kept_values(made.param_groups),
            reader.counts([one.parameter for one, _ in optimizer._own]),
            record.updates,
        )
        engine.wait()
    made._note_versions()


def verify(optimizer: ShardedAdamW, sources: Sequence[_Source]) -> None:
    """Read what this rank needs of `sources`. Raises DataMismatchError for damage."""
    reader = _OldState(sources, specs_of(optimizer.param_groups), optimizer._own[0][0])
    for wanted, _ in optimizer._own:
        for _ in reader.take(wanted):
            pass


def _remove_unpinned(directory: Path, size: int) -> None:
    """Remove the parts of other numbers of ranks, unless checkpoints may need them."""
    for other in directories(directory):
        first = directory / rank_directory(0, other)
        if other != size and not found_pins(first, records_in(first)):
            remove_size(directory, other)
    if set(directories(directory)) <= {size}:
        forget_size(directory)


def remove_size(directory: Path, size: int) -> None:
    """Remove the parts of `size` ranks. That of rank 0, which has the list of pins, goes last."""
    for rank in reversed(range(size)):
        shutil.rmtree(directory / rank_directory(rank, size), ignore_errors=True)


def _choice(
    directory: Path, size: int, wanted: int | Literal["latest", "pinned"]
) -> tuple[int, int, tuple[str, ...]]:
    """Return the old number of ranks, the updates and the held pins of the state to convert."""
    noted = noted_size(directory)
    if noted is not None and noted.pins and wanted == "latest":
        return noted.size, 0, noted.pins
    best: list[tuple[int, int]] = []
    for count in complete_sizes(directory):
        if count != (noted.size if noted else count) or count == size:
            continue
        paths = [directory / rank_directory(rank, count) for rank in range(count)]
        offers = [GenerationOffer.of(read_records(path, read_layout(path))) for path in paths]
        found = chosen(offers, wanted, str(directory))
        if found is not None:
            best.append((found[0], count))
    if not best:
        raise TargetError(
            f"{directory}: holds no state that all ranks of a job have; make one with "
            "ShardedAdamW(parameters, directory)"
        )
    updates, count = max(best)
    return count, updates, ()


def _at(directory: Path, count: int, updates: int) -> list[_Source]:
    found = []
    for rank in range(count):
        path = directory / rank_directory(rank, count)
        records = kept_records(records_in(path))
        record = next(r for r in records if r.updates == updates)
        found.append(_Source(path, read_layout(path), record))
    return found


def sources_of_pins(directory: Path, pins: Sequence[str]) -> list[_Source]:
    """Return the parts of the state with these held pins, one for each of its ranks.

    Raises DataMismatchError when one is not there.
    """
    found = []
    for rank, name in enumerate(pins):
        path = directory / rank_directory(rank, len(pins))
        records = records_in(path)
        generations = [
            pin.generation for pin in (records[0].pins if records else ()) if pin.extra == name
        ]
        record = next((r for r in records if r.generation in generations and not r.damaged), None)
        if record is None:
            raise DataMismatchError(f"{path}: that generation is not pinned here, or is damaged")
        found.append(_Source(path, read_layout(path), record))
    return found


class _OldState:
    """The fp32 tensors of the old ranks in the order of the flat parameters, from one place on."""

    def __init__(
        self, sources: Sequence[_Source], specs: Sequence[Any], first: ParameterRange
    ) -> None:
        """Raises StateMismatchError when `sources` are of another model than `specs`."""
        self._sources = sources
        self._ranges = ranges_of([one.elements for one in specs], len(sources))
        for source, own in zip(sources, self._ranges, strict=True):
            _check_same(source, own, specs)
        self._pieces = self._read_from((first.parameter, first.begin))
        self._left: tuple[ParameterRange, list[torch.Tensor]] | None = None

    def counts(self, parameters: Sequence[int]) -> Any:
        """Return how often each of `parameters` was updated."""
        known: dict[int, int] = {}
        for source, own in zip(self._sources, self._ranges, strict=True):
            for one, count in zip(own, source.record.counts, strict=True):
                known[one.parameter] = int(count)
        return np.array([known[one] for one in parameters], dtype=np.uint64)

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
            layout, record = source.layout, source.record
            file = StateFile(source.directory / "state", file_sizes(layout)["state"])
            try:
                for chunk in range(layout.chunks):
                    pieces = layout.pieces(chunk)
                    last = own[pieces[-1].parameter]
                    if (last.parameter, last.begin + pieces[-1].end) <= first:
                        continue
                    row = record.rows[chunk]
                    data = file.read(
                        layout.state_bytes(chunk), layout.state_offset(chunk, int(row["slot"]))
                    )
                    check_slot_of(file.path, data[:BLOCK].tobytes(), row, chunk)
                    check_digest(file.path, digest_of(data[BLOCK:]), row, chunk)
                    tensors = torch.from_numpy(data[BLOCK:]).view(torch.float32)
                    parts = tensors.split(layout.elements(chunk))
                    for piece in pieces:
                        start = own[piece.parameter]
                        yield (
                            ParameterRange(
                                start.parameter, start.begin + piece.begin, start.begin + piece.end
                            ),
                            [place(piece, part) for part in parts],
                        )
            finally:
                file.close()


def check_digest(path: Path, digest: int, row: Any, chunk: int) -> None:
    """Raise DataMismatchError unless the chunk has the XXH3 of its row."""
    if digest != int(row["state"]):
        raise DataMismatchError(f"{path}: chunk {chunk} differs from its checksum")


def _check_same(source: _Source, own: Sequence[ParameterRange], specs: Sequence[Any]) -> None:
    expected = [(specs[one.parameter].dtype, one.end - one.begin) for one in own]
    found = [(one.dtype, one.elements) for one in source.layout.parameters]
    if expected != found:
        raise StateMismatchError(
            str(source.directory),
            missing=[],
            unexpected=[],
            misshaped={"the range of this rank": (str(expected[:3]), str(found[:3]))},
        )


class _Filling:
    """Puts the old state into each chunk of the new generation. An Update."""

    def __init__(
        self,
        layout: StateLayout,
        parameters: Sequence[torch.Tensor],
        own: Sequence[tuple[ParameterRange, Any]],
        old: _OldState,
    ) -> None:
        self._layout, self._parameters, self._old = layout, parameters, old
        self._starts = [one for one, _ in own]

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
