"""load_sharded: of a safetensors model each rank gets its parts, read by all ranks together."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

import torch

from iobench.checkpoint.manifest import FileRecord
from iobench.checkpoint.piece_reader import (
    AT_ONCE,
    PieceReader,
    StoredPiece,
    shared_reader,
    windows,
)
from iobench.checkpoint.ranked.structure import empty_local, is_sharded, local_box
from iobench.checkpoint.stored import WantedTensor
from iobench.errors import DataMismatchError, StateMismatchError, TargetError, transfer_errors
from iobench.formats.safetensors import SafetensorsFile, TensorInFile
from iobench.formats.tensor_slices import GAP_BYTES, CutImage, CutPart, Span, rows_of, spans
from iobench.formats.tensors import dtype_name
from iobench.ranks.control import Control, shared_control
from iobench.ranks.restore_plan import RestoreMode, check_restore_mode
from iobench.ranks.world import AnyWorld, World
from iobench.text import parse_json
from iobench.writers.base import StoredReader, Writer
from iobench.writers.image import Bytes, FileImage
from iobench.writers.s3_store.target import S3Target, is_s3
from iobench.writers.transfer import Meter, Transfer

_SUFFIX, _INDEX = ".safetensors", ".safetensors.index.json"
_DEADLINE_S = 3600.0


def load_sharded(
    location: str | Path,
    like: Mapping[str, Any],
    writer: Writer,
    *,
    restore_mode: RestoreMode = "auto",
    world: AnyWorld = "job",
) -> tuple[dict[str, Any], Transfer]:
    """Return the parts of a model that `like` names; see `iobench.safetensors.load_sharded`.

    With `restore_mode="all"` no other rank is asked. All ranks fail alike.
    """
    check_restore_mode(restore_mode)
    alone = restore_mode == "all"
    whole = Control(World.single()) if alone else shared_control(World.of(world))
    control = whole.sub("load_sharded", deadline_s=_DEADLINE_S)

    def prepare() -> ShardedLoad:
        home, names = _files(location, writer)
        return ShardedLoad(home, names, like, writer)

    load, found = control.together(f"headers of {location}", prepare, ShardedLoad.digest)
    if len(set(found)) > 1:
        raise DataMismatchError(f"{location}: the ranks see different files")
    if control.world.size == 1:
        transfer = load.read_alone()
    else:
        with shared_reader(control, restore_mode) as reader:
            transfer = load.read(PieceReader(reader))
    control.together(f"parts of {location}", load.check_unchanged)
    return load.tensors(), transfer


class _Part(NamedTuple):
    """A span, the memory for its elements, and what it is all of: None if there are others."""

    span: Span
    place: torch.Tensor
    whole: WantedTensor | None


class ShardedLoad:
    """What one rank reads of safetensors files; see `load_sharded`."""

    def __init__(
        self, home: str | Path, names: Sequence[str], like: Mapping[str, Any], writer: Writer
    ) -> None:
        """Read the headers of the files `names` in `home`. Raises what `load_sharded` raises."""
        self._writer, self._home = writer, home
        self._files = {name: SafetensorsFile(name, home, writer) for name in names}
        self._parts: dict[StoredPiece, _Part] = {}
        at = {name: file for file in self._files.values() for name in file.tensors}
        wrong = {
            name: shown
            for name, value in like.items()
            if name in at and (shown := _difference(value, at[name].tensors[name]))
        }
        if wrong or like.keys() - at.keys():
            missing = [name for name in like if name not in at]
            raise StateMismatchError(str(home), missing=missing, misshaped=wrong)
        self._wanted = {name: self._want(at[name], name, value) for name, value in like.items()}

    def digest(self) -> str:
        """Return a text that differs if another rank sees other files."""
        made = hashlib.sha256()
        for name, file in self._files.items():
            made.update(f"{name} {file.size_bytes} ".encode() + file.header)
        return made.hexdigest()

    def _want(self, file: SafetensorsFile, name: str, value: Any) -> WantedTensor:
        stored = file.tensors[name]
        if is_sharded(value):
            wanted = WantedTensor(empty_local(value), sharded=value)
            sizes, offsets = local_box(value)
            view = stored.slice(tuple(map(slice, offsets, map(add, offsets, sizes))))
        elif isinstance(value, torch.Tensor):
            device = "cpu" if value.is_meta else value.device
            view = stored.slice()
            wanted = WantedTensor(torch.empty(value.shape, dtype=value.dtype, device=device))
        else:
            view = stored.slice(value)
            wanted = WantedTensor(torch.empty(view.shape, dtype=view.dtype, device="cpu"))
        if wanted.memory.is_cpu:
            wanted.memory = stored.room(view)
        found = spans(view)
        for span, place in zip(found, rows_of(wanted.memory, found), strict=True):
            start, stop = stored.start + span.start, stored.start + span.stop
            whole = wanted if len(found) == 1 and span.dense(view.itemsize) else None
            piece = StoredPiece(file.path, start, stop, None, name)
            self._parts[piece] = _Part(span, place, whole)
        return wanted

    def read_alone(self) -> Transfer:
        """Fill the memory of all that is wanted, and ask no other rank."""
        moved = [Meter().transfer(self._writer.name, "read", 0, durable=True, files=0)]
        for here in (True, False):
            pieces = [piece for piece, part in self._parts.items() if part.place.is_cpu == here]
            moved += map(self._fill, windows(pieces, sys.maxsize if here else AT_ONCE))
        return Transfer.total(moved)

    def _fill(self, window: Mapping[str, Sequence[StoredPiece]]) -> Transfer:
        """Read pieces of all files in one call; those of a device by way of the host."""
        images, copies = [], []
        for path, pieces in window.items():
            cuts = []
            for piece in pieces:
                span, place, _ = self._parts[piece]
                into = place
                if not place.is_cpu:
                    into = torch.empty_like(place, device="cpu")
                    copies.append((place, into))
                cuts.append(CutPart(piece.start - span.start, span, into))
            images.append(CutImage(path, self._files[path].size_bytes, cuts))
        moved = self._writer.read_many(((one, one.ranges) for one in images), self._home)
        for place, found in copies:
            place.copy_(found)
        return moved

    def read(self, reader: PieceReader) -> Transfer:
        """Fill the memory of all that is wanted; a large part stays where it was read."""
        records = {
            path: FileRecord(path=path, size_bytes=file.size_bytes, pieces=())
            for path, file in self._files.items()
        }
        try:
            copy = StoredReader(self._writer, self._home)
            return reader.read(copy, records, list(self._parts), self._deliver)
        finally:
            reader.finish()

    def _deliver(self, piece: StoredPiece, data: Bytes) -> bool:
        span, place, whole = self._parts[piece]
        found = span.view(data, place.dtype)
        large = place.is_cpu and len(data) >= GAP_BYTES
        if whole is not None and large and not found.data_ptr() % found.itemsize:
            whole.memory = found.view(whole.memory.shape)
            return True
        place.copy_(found)
        return False

    def check_unchanged(self) -> None:
        """Raise DataMismatchError if a file was replaced meanwhile."""
        for file in self._files.values():
            file.check_unchanged()

    def tensors(self) -> dict[str, Any]:
        """Return what was read, by name."""
        return {name: one.tensor() for name, one in self._wanted.items()}


def _difference(value: Any, stored: TensorInFile) -> tuple[str, str] | None:
    """Return what a tensor of `like` and the stored one are, if they differ."""
    if not isinstance(value, torch.Tensor):
        return None
    kinds = (value, stored.slice())
    expected, found = (f"{dtype_name(one.dtype)} {list(one.shape)}" for one in kinds)
    return None if expected == found else (expected, found)


def _files(location: str | Path, writer: Writer) -> tuple[str, list[str]]:
    """Return the directory or prefix, and the names of the files in it, in order.

    Those of an index, if there is one: a directory may have another copy of the tensors.
    """
    writer.check_scheme(location)
    path = str(location).rstrip("/")
    home, _, name = path.rpartition("/")
    if name.endswith(_SUFFIX) and (is_s3(path) or not os.path.isdir(path)):
        return home or ("/" if path.startswith("/") else "."), [name]
    if is_s3(path):
        key = S3Target.parse(path).key
        names = [one[len(key) :].lstrip("/") for one in writer.objects(path).keys()]  # noqa: SIM118 -- not a mapping
    else:
        with transfer_errors("listing", path):
            names = os.listdir(path)
    for name in sorted(names):
        if name.endswith(_INDEX) and "/" not in name:
            return path, _listed(path, name, writer)
    found = sorted(name for name in names if name.endswith(_SUFFIX) and "/" not in name)
    if not found:
        raise TargetError(f"{location}: there are no safetensors files here")
    return path, found


def _listed(home: str, index: str, writer: Writer) -> list[str]:
    file = f"{home}/{index}"
    with closing(writer.open_source(file)) as source:
        text = source.read()
    try:
        names: list[str] = sorted(set(parse_json(text)["weight_map"].values()))
        for name in names:
            FileImage.of(name, ())  # refuses what is not below the directory
    except (ValueError, RecursionError, LookupError, AttributeError, TypeError) as error:
        raise DataMismatchError(f"{file}: not an index of safetensors files ({error})") from error
    return names
