"""The state in other forms, read from a generation or put into the next one.

As torch.optim.AdamW has it, also in a file. And as the files of a pinned generation in a remote
tier: `optimizer-state` has the fp32 tensors of all chunks in order, without the headers of the
slots; the checksums of its pieces are those in the generation's record. `optimizer.json` describes
them.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec
import numpy as np
import torch

from iobench.checkpoint.checksums import read_file
from iobench.checkpoint.manifest import FileRecord, Manifest, Piece
from iobench.checkpoint.piece_reader import PieceReader, StoredPiece, pieces_of
from iobench.checkpoint.ranked.structure import is_sharded, sharded_like
from iobench.checkpoint.rebuild import readable
from iobench.checkpoint.state_tree import parsed
from iobench.errors import DataMismatchError, StateError, TransferError, UsageError
from iobench.formats import safetensors, torch_file
from iobench.formats.tensors import torch_dtype
from iobench.offload.chunks import ChunkBuffer, read_chunks
from iobench.offload.files import StateFile, file_sizes
from iobench.offload.layout import ADAM, BLOCK, GenerationRecord, ParameterPiece, StateLayout
from iobench.offload.parameters import (
    check_values,
    kept_values,
    local_part,
    local_shard,
    put_values,
)
from iobench.offload.restore import Wanted, candidates, fill_parameters
from iobench.offload.state import OptimizerState
from iobench.offload.store import GenerationStore
from iobench.offload.update import flat_view, place, step_counter
from iobench.remote.source_file import LocalDamageError, SourceFile
from iobench.writers.base import StoredReader, Writer
from iobench.writers.buffered import BufferedWriter
from iobench.writers.image import Bytes, FileImage

if TYPE_CHECKING:
    import numpy.typing as npt


_SUFFIXES = (".safetensors", ".pt", ".pth")


def stock_state(
    store: GenerationStore,
    record: GenerationRecord,
    *,
    whole: bool = False,
) -> dict[int, dict[str, torch.Tensor]]:
    """Return the `state` of torch's optimizer by the index of each parameter; verified.

    Each has `step`, `exp_avg` and `exp_avg_sq`; a 16-bit parameter also has `master`: its fp32
    weights. Parameters that were never updated have none, as in torch. With `whole` each has all
    of them. Takes as much memory. Raises DataMismatchError, TransferError.
    """
    layout = store.layout
    state: dict[int, dict[str, torch.Tensor]] = {}
    for index, spec in enumerate(layout.parameters):
        if whole or record.counts[index]:
            masters = whole or spec.dtype != "float32"
            names = (*ADAM[1:], ADAM[0]) if masters else ADAM[1:]
            made = {
                name: torch.empty(spec.shape, dtype=torch.float32, device="cpu") for name in names
            }
            state[index] = {"step": step_counter(int(record.counts[index])), **made}

    def deliver(buffer: ChunkBuffer) -> None:
        for piece in layout.pieces(buffer.chunk):
            made = state.get(piece.parameter, {})
            for name, part in zip(ADAM, buffer.tensors(), strict=True):
                if name in made:
                    flat_view(made[name])[piece.begin : piece.end].copy_(place(piece, part))

    read_chunks(store, record, "state", deliver)
    return state


def state_dict_of(here: OptimizerState, *, whole: bool = False) -> dict[str, Any]:
    """Return the state_dict of torch's optimizer, read from storage into memory; see `stock_state`.

    The state of a DTensor is DTensors with its sharding; on a GPU mesh they are moved to the GPU,
    where torch has them too. Waits until all steps are durable.
    """
    engine = here.settled(forget=True)
    engine.wait()
    record, parameters = engine.store.base, here.parameters()
    state: dict[int, dict[str, torch.Tensor]] = {}
    if record is not None:
        state = stock_state(engine.store, record, whole=whole)
    for index, values in state.items():
        if is_sharded(parameters[index]):
            for name in values.keys() & {*ADAM}:
                values[name] = sharded_like(parameters[index], values[name])
    groups, start = [], 0
    for group in here.groups:
        indices = list(range(start, start + len(group["params"])))
        groups.append({**group, "params": indices})
        start += len(indices)
    return {"state": state, "param_groups": groups}


class StockSource:
    """The `state` of a state_dict. A StateSource.

    Parameters without a state begin anew. Master weights are those of the state where it has them,
    and otherwise the values of the model.
    """

    def __init__(
        self,
        layout: StateLayout,
        parameters: Sequence[torch.Tensor],
        state: Mapping[int, Mapping[str, torch.Tensor]],
    ) -> None:
        """Raises StateError when `state` does not fit the parameters."""
        unknown = [index for index in state if index not in range(len(parameters))]
        if unknown:
            raise StateError(f"the state has parameters {unknown}; there are {len(parameters)}")
        self._parameters = parameters
        self._state = {
            index: {kind: local_part(value, parameters[index]) for kind, value in values.items()}
            for index, values in state.items()
        }
        for index, values in self._state.items():
            parameter = local_shard(parameters[index])
            name = layout.parameters[index].name
            for kind in ADAM:
                if values.get(kind) is not None and values[kind].shape != parameter.shape:
                    raise StateError(
                        f"{kind} of parameter {name} has the shape {list(values[kind].shape)}; "
                        f"the parameter has {list(parameter.shape)}"
                    )
            if "max_exp_avg_sq" in values:
                raise StateError(f"parameter {name} has max_exp_avg_sq: amsgrad is not supported")
            if len({kind in values for kind in ("step", *ADAM[1:])}) > 1:
                raise StateError(f"parameter {name} lacks step, exp_avg or exp_avg_sq")

    @property
    def counts(self) -> npt.NDArray[np.uint64]:
        """See StateSource."""
        states = [self._state.get(index, {}) for index in range(len(self._parameters))]
        return np.array([int(one.get("step", 0)) for one in states], dtype=np.uint64)

    def read(self, parameter: int, begin: int, into: Sequence[torch.Tensor]) -> None:
        """See StateSource."""
        values = self._state.get(parameter, {})
        end = begin + len(into[0])
        for kind, own in zip(ADAM, into, strict=True):
            if values.get(kind) is not None:
                own.copy_(values[kind].detach().reshape(-1)[begin:end])
            elif kind == ADAM[0]:
                own.copy_(flat_view(self._parameters[parameter])[begin:end])
            else:
                own.zero_()


def load_state(here: OptimizerState, state_dict: Mapping[str, Any], updates: int) -> None:
    """Make the state and the groups of a state_dict the next generation, after `updates` steps.

    It is durable on return, in all ranks. Raises UsageError or StateError when it does not fit.
    """
    engine = here.settled(forget=True)

    def source_of() -> StockSource:
        state = state_by_index(here.groups, state_dict)
        return StockSource(engine.layout, here.parameters(), state)

    source = here.ranks.each(source_of)
    put_values(here.groups, kept_values(state_dict["param_groups"]))
    for group in here.groups:
        group["decoupled_weight_decay"] = here.kind == "AdamW"  # like torch
        check_values(group)
    here.replace(source, updates)


def state_by_index(
    groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]
) -> dict[int, Mapping[str, torch.Tensor]]:
    """Return the state of a state_dict of torch by the index of each of our parameters.

    Raises UsageError when the groups have other sizes, or are those of another optimizer.
    """
    sizes = [len(group["params"]) for group in groups]
    given = [len(group["params"]) for group in state_dict["param_groups"]]
    if sizes != given:
        raise UsageError(f"the state has groups of {given} parameters; the optimizer has {sizes}")
    if any("betas" not in group for group in state_dict["param_groups"]):
        raise UsageError("the state is not that of torch.optim.AdamW or Adam: it has no betas")
    order = [index for group in state_dict["param_groups"] for index in group["params"]]
    state = state_dict["state"]
    return {ours: state[theirs] for ours, theirs in enumerate(order) if theirs in state}


def export(directory: Path, wanted: Wanted, output: Path) -> int:
    """Write one generation to `output` and return its updates; durable and verified.

    `*.safetensors` gets the parameters in their own dtypes, `*.pt` the state_dict of the stock
    optimizer. Needs the lock: no trainer may be at work. Takes memory for the whole file.
    Raises UsageError for another suffix or an unknown step, TargetError, DataMismatchError and
    TransferError.
    """
    if output.suffix not in _SUFFIXES:
        raise UsageError(f"{output}: its name must end with {' or '.join(_SUFFIXES)}")
    store = GenerationStore.open(directory)
    try:
        found = next(iter(candidates(store, wanted)), None)
        if found is None:
            raise UsageError(f"{directory}: has no generation")
        record = found.record
        store.check_headers(record)
        writer, parent = BufferedWriter(), output.parent
        if output.suffix == ".safetensors":
            safetensors.save(_parameters(store, record), output.name, parent, writer)
        else:
            torch_file.save(_state_dict(store, record), output.name, parent, writer)
        return record.updates
    finally:
        store.close()


def _parameters(store: GenerationStore, record: GenerationRecord) -> dict[str, torch.Tensor]:
    specs = store.layout.parameters
    made = [torch.empty(one.shape, dtype=torch_dtype(one.dtype)) for one in specs]
    fill_parameters(store, record, made)
    return {spec.name: tensor for spec, tensor in zip(specs, made, strict=True)}


def _state_dict(store: GenerationStore, record: GenerationRecord) -> dict[str, Any]:
    specs = store.layout.parameters
    groups = []
    for number, values in enumerate(record.groups):
        own = [index for index, spec in enumerate(specs) if spec.group == number]
        names = [specs[index].name for index in own]
        betas = {"betas": tuple(values["betas"])} if "betas" in values else {}
        groups.append({**values, **betas, "params": own, "param_names": names})
    return {"state": stock_state(store, record), "param_groups": groups}


_STATE, _DESCRIPTION = "optimizer-state", "optimizer.json"
_Schema = Literal["iobench.offload.export/1"]


def file_of(layout: StateLayout, record: GenerationRecord) -> FileRecord:
    """Return the record of the file `optimizer-state` of a generation; reads nothing."""
    pieces = tuple(
        Piece(f"chunk {chunk}", size, f"{int(row['state']):016x}")
        for chunk, (size, row) in enumerate(zip(_sizes(layout), record.rows, strict=True))
    )
    return FileRecord(path=_STATE, size_bytes=sum(one.size_bytes for one in pieces), pieces=pieces)


def _sizes(layout: StateLayout) -> list[int]:
    """Return the bytes of each chunk in the file."""
    return [layout.slot_bytes("state", chunk) - BLOCK for chunk in range(layout.chunks)]


def description_of(layout: StateLayout, record: GenerationRecord) -> FileImage:
    """Return the file `optimizer.json` of a generation."""
    text = json.dumps(
        {
            "schema": get_args(_Schema)[0],
            "layout": json.loads(layout.to_json()),
            "updates": record.updates,
            "counts": [int(count) for count in record.counts],
            "groups": [dict(group) for group in record.groups],
        }
    )
    return FileImage.of(_DESCRIPTION, [np.frombuffer(text.encode(), dtype=np.uint8)])


class SlotsFile(SourceFile):
    """The file `optimizer-state`, read from the slots of a pinned generation past the page cache.

    Its pin must stay held. Any thread may read.
    """

    def __init__(self, directory: Path, layout: StateLayout, record: GenerationRecord) -> None:
        """Open the file of the slots. Raises LocalDamageError."""
        self.name, self._layout, self._rows = _STATE, layout, record.rows
        self._starts = [0, *itertools.accumulate(_sizes(layout))]
        self.size_bytes = self._starts[-1]
        try:
            self._file = StateFile(directory / "state", file_sizes(layout)["state"])
        except (DataMismatchError, TransferError) as error:
            raise LocalDamageError(str(error)) from error

    def fill(self, start: int, block: Bytes) -> None:
        """Fill `block` with the bytes from `start` on. Raises LocalDamageError."""
        at, stop = start, start + len(block)
        chunk = bisect.bisect_right(self._starts, at) - 1
        while at < stop:
            first, end = self._starts[chunk], min(stop, self._starts[chunk + 1])
            block[at - start : end - start] = self._read(chunk, at - first, end - first)
            at, chunk = end, chunk + 1

    def _read(self, chunk: int, start: int, stop: int) -> Bytes:
        """Return a part of a chunk; direct reads are of whole blocks."""
        begin, end = start // BLOCK * BLOCK, -(-stop // BLOCK) * BLOCK
        offset = self._layout.offset("state", chunk, int(self._rows[chunk]["slot"])) + BLOCK
        try:
            data = self._file.read(end - begin, offset + begin)
        except (DataMismatchError, TransferError) as error:
            raise LocalDamageError(str(error)) from error
        return data[start - begin : stop - begin]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _Description(msgspec.Struct):
    """The file `optimizer.json`."""

    schema: _Schema
    layout: dict[str, Any]
    updates: int
    counts: list[int]
    groups: list[dict[str, Any]]


class ExportedState:
    """The optimizer's state in the files of a checkpoint at `location`. A StateSource.

    It takes memory for one chunk, however large the file is.
    """

    def __init__(self, manifest: Manifest, location: str | Path, writer: Writer) -> None:
        """Read the description. Raises DataMismatchError, TransferError."""
        self._copy = StoredReader(writer, location)
        where = f"{location}/{_DESCRIPTION}"
        with readable(where):
            found = parsed(read_file(self._copy, manifest.file(_DESCRIPTION)), _Description)
            (pinned,) = manifest.pinned
            (self._file,) = (one for one in pinned.files if one.path == _STATE)
            self.counts: npt.NDArray[np.uint64] = np.array(found.counts, dtype=np.uint64)
        self.layout = StateLayout.from_json(json.dumps(found.layout), where)
        self.updates, self.groups = found.updates, found.groups
        parts = [piece.size_bytes for piece in self._file.pieces], len(self.counts)
        if parts != (_sizes(self.layout), len(self.layout.parameters)):
            raise DataMismatchError(f"{where}: describes another file than {self._file.path}")
        self._pieces = self._read_pieces()
        self._piece: tuple[ParameterPiece, list[torch.Tensor]] | None = None

    @property
    def where(self) -> str:
        """The file, for messages."""
        return f"{self._copy.location}/{self._file.path}"

    def read(self, parameter: int, begin: int, into: Sequence[torch.Tensor]) -> None:
        """See StateSource. Its chunks may have another size than ours."""
        at, end = begin, begin + len(into[0])
        while at < end:
            if self._piece is None or (self._piece[0].parameter, self._piece[0].end) <= (
                parameter,
                at,
            ):
                self._piece = next(self._pieces)
                continue
            piece, tensors = self._piece
            stop = min(piece.end, end)
            for own, tensor in zip(into, tensors, strict=True):
                own[at - begin : stop - begin].copy_(tensor[at - piece.begin : stop - piece.begin])
            at = stop

    def _read_pieces(self) -> Iterator[tuple[ParameterPiece, list[torch.Tensor]]]:
        """Yield each piece with its tensors, compared with their checksum."""
        files = {self._file.path: self._file}
        read: list[Bytes] = []

        def deliver(_: StoredPiece, data: Bytes) -> bool:
            read.append(data)
            return True

        for chunk, stored in enumerate(pieces_of(self._file)):
            PieceReader().read(self._copy, files, [stored], deliver)
            data = torch.from_numpy(read.pop()).view(torch.float32)
            parts = data.split(self.layout.elements(chunk))
            for piece in self.layout.pieces(chunk):
                yield piece, [place(piece, part) for part in parts]
