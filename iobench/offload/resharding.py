"""reshard: the state of another number of ranks, read and written anew for this one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from iobench.dist.agreed import agreed
from iobench.errors import StateMismatchError, TargetError
from iobench.offload.agreement import GenerationOffer, chosen, kept_records
from iobench.offload.algorithms import AdamW
from iobench.offload.buffers import ChunkBuffer
from iobench.offload.files import StateFile, file_sizes, read_layout
from iobench.offload.groups import kept_values, put_values, specs_of
from iobench.offload.layout import BLOCK, StateLayout
from iobench.offload.model import flat_view, place
from iobench.offload.ranges import ParameterRange, ranges_of
from iobench.offload.record import GenerationRecord
from iobench.offload.slots import check_slot_of, digest_of
from iobench.offload.store import read_records

if TYPE_CHECKING:
    from iobench.offload.ranked import ShardedAdamW

__all__ = ["other_sizes", "reshard"]

_NAME = re.compile(r"rank-(\d+)-of-(\d+)")


def other_sizes(directory: Path, size: int) -> list[int]:
    """Return the numbers of ranks, other than `size`, of which `directory` has all ranks."""
    found: dict[int, set[int]] = {}
    for path in directory.iterdir() if directory.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and (path / "layout.json").exists():
            found.setdefault(int(match[2]), set()).add(int(match[1]))
    return sorted(n for n, ranks in found.items() if n != size and ranks == set(range(n)))


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

    Raises TargetError when there is none, StateMismatchError for another model. The old files are
    removed when the new state is durable in all ranks.
    """

    def together(phase: str, work: Any) -> list[Any]:
        return agreed(
            optimizer._control, f"offload {phase}", work, deadline_s=optimizer._deadline_s
        )

    size = optimizer._world.size
    answers = together("old state", lambda: _choice(directory, size, wanted))
    old_size, updates = answers[0]
    own = optimizer._own_directory(directory)
    made: list[AdamW] = []

    def fill() -> None:
        sources = _sources(directory, old_size, updates)
        record = sources[0].record
        put_values(optimizer.param_groups, record.groups)
        shutil.rmtree(own, ignore_errors=True)  # of a conversion that did not end
        pins = sources[0].layout.pins
        local = AdamW(optimizer._shards(), own, pins=pins, **options)
        made.append(local)
        reader = _OldState(sources, specs_of(optimizer.param_groups), optimizer._own[0][0])
        with local._running().local() as engine:
            engine.write_generation(
                _Filling(engine.layout, [p for _, p in optimizer._own], optimizer._own, reader),
                kept_values(local.param_groups),
                reader.counts([one.parameter for one, _ in optimizer._own]),
                updates,
            )
            engine.wait()

    try:
        together("conversion", fill)
    except BaseException:
        for one in made:
            one.close()
        raise
    if optimizer._world.rank == 0:
        for rank in range(old_size):
            shutil.rmtree(directory / f"rank-{rank}-of-{old_size}", ignore_errors=True)
    together("removal", lambda: None)
    return made[0]


def _choice(
    directory: Path, size: int, wanted: int | Literal["latest", "pinned"]
) -> tuple[int, int]:
    """Return the old number of ranks and the updates of the state to convert."""
    best: list[tuple[int, int]] = []
    for count in other_sizes(directory, size):
        paths = [directory / f"rank-{rank}-of-{count}" for rank in range(count)]
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
    return count, updates


def _sources(directory: Path, count: int, updates: int) -> list[_Source]:
    found = []
    for rank in range(count):
        path = directory / f"rank-{rank}-of-{count}"
        layout = read_layout(path)
        records = kept_records(read_records(path, layout))
        found.append(_Source(path, layout, next(r for r in records if r.updates == updates)))
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
    from iobench.errors import DataMismatchError

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
