"""verify: whether the checkpoints at a path are whole, and what could not be proved.

verify_against: two checkpoints, tensor by tensor, whatever their formats.
"""

from __future__ import annotations

import errno
import itertools
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import xxhash

from iobench._version import __version__
from iobench.checkpoint.manifest import FileRecord, Manifest, Piece
from iobench.errors import DataMismatchError, TransferError, UsageError
from iobench.formats.many_parts import WindowImage
from iobench.formats.tensor_slices import room_for
from iobench.formats.tensors import torch_dtype
from iobench.verification.directories import SIDECAR, add_record, inventory_of
from iobench.verification.inventory import (
    CheckedRange,
    FileTree,
    ListedFile,
    ListedTensor,
    TensorPart,
    VerifyInventory,
    VerifyReport,
    unreadable,
)
from iobench.verification.reading import Layer, OnRead, ValueCounts, read_all
from iobench.writers.base import Writer
from iobench.writers.config import writer_of
from iobench.writers.image import Bytes, FileImage
from iobench.writers.s3_store.target import is_s3


def verify(
    path: str | Path,
    *,
    writer: Writer | str | None = None,
    record: bool = False,
    values: bool = False,
    progress: OnRead | None = None,
) -> VerifyReport:
    """Read every byte of the checkpoints at `path`, and return what is wrong with them.

    `path` is a file, a directory or `s3://bucket/prefix`: checkpoints of iobench, safetensors and
    Hugging Face directories, files of torch.save (Lightning, DeepSpeed), DCP (Megatron). Only
    indexes are interpreted; nothing is unpickled that could run code. Checksums are compared where
    there are some, and `unproved` names the files without. `record` writes a file with the XXH3-64
    of every tensor next to them, if nothing is wrong; later calls compare it. `values` counts NaN,
    infinities and tensors of zeros.

    `writer` reads: a Writer, its name or a config; by default `hybrid`, and `s3` in a bucket.
    `progress` gets the bytes that were read and those to read. Raises UsageError if there is no
    checkpoint here, and TransferError. Nothing but the recorded file is changed.
    """
    began = time.perf_counter()
    location = FileTree(path, writer_for(path, writer))
    inventory = inventory_of(location)
    sidecar = f"{next(iter(location.sizes))}.{SIDECAR}" if location.single else SIDECAR
    recorded, counts = dict[str, _Recorder](), ValueCounts()
    if record:
        for name, size in location.sizes.items():
            if size >= 0 and name != sidecar:
                inventory.file(name)
    else:
        _add_recorded(inventory, sidecar)
    if not inventory.files and not inventory.findings:
        raise UsageError(
            f"{path}: no checkpoint was recognised; iobench verify reads checkpoints of iobench, "
            "*.safetensors, *.pt, *.pth, *.bin, *.ckpt and DCP directories"
        )

    def more(name: str, file: ListedFile) -> list[Layer]:
        layers = [counts.layer(name, file)] if values else []
        if record:
            recorded[name] = _Recorder(name, file)
            layers.append(recorded[name])
        return layers

    read_all(inventory, more, progress)
    counted = counts.summary(inventory) if values else None
    report = VerifyReport(
        findings=tuple(sorted(inventory.findings, key=lambda one: one.severity)),
        kinds=tuple(inventory.kinds),
        files=len(inventory.files),
        tensors=len(inventory.tensors),
        size_bytes=sum(one.size_bytes for one in inventory.files.values()),
        proved_bytes=sum(one.proved_bytes for one in inventory.files.values()),
        elapsed_s=time.perf_counter() - began,
        unproved=_unproved(inventory),
        values=counted,
    )
    if record and report.ok:
        _write(location, sidecar, [recorded[name].record for name in sorted(inventory.files)])
    return report


def writer_for(path: str | Path, writer: Writer | str | None) -> Writer:
    """Return `writer`, or the best one for `path`. Raises UsageError for an unknown one."""
    return writer_of(writer or ("s3" if is_s3(path) else "hybrid"))


def _unproved(inventory: VerifyInventory) -> dict[str, str]:
    """Return why files have no checksum, without those of which every byte has one."""
    return {
        path: why
        for path, why in sorted(inventory.unproved.items())
        if path in inventory.files
        and inventory.files[path].proved_bytes < inventory.files[path].size_bytes
    }


def _add_recorded(inventory: VerifyInventory, sidecar: str) -> None:
    """Add the checksums that an earlier call has recorded."""
    location = inventory.location
    try:
        if not location.single and sidecar not in location.sizes:
            return
        manifest = Manifest.parse(location.read(sidecar), sidecar)
    except (DataMismatchError, TransferError) as error:
        if location.single and isinstance(error, TransferError) and error.errno == errno.ENOENT:
            return
        inventory.error(sidecar, unreadable(error).removeprefix(f"{sidecar}: "))
        return
    for one in manifest.files:
        add_record(inventory, "", one)
    named = {one.path for one in manifest.files}
    for path in inventory.files:
        if path not in named:
            inventory.unproved[path] = f"is not in {sidecar}: it came later"


class _Recorder(Layer):
    """Computes the XXH3-64 of every tensor of a file, and of what is between them."""

    def __init__(self, path: str, file: ListedFile) -> None:
        ranges, end = [], 0
        for tensor, part in file.in_order():
            if part.start < part.stop:
                if end < part.start:
                    ranges.append(CheckedRange(end, part.start, ""))
                ranges.append(CheckedRange(part.start, part.stop, tensor.name))
                end = part.stop
        if end < file.size_bytes:
            ranges.append(CheckedRange(end, file.size_bytes, ""))
        super().__init__(ranges, lambda _: xxhash.xxh3_64(), self._add)
        self._path, self._size_bytes = path, file.size_bytes
        self._pieces: list[Piece] = []

    def _add(self, one: CheckedRange, digest: xxhash.xxh3_64) -> None:
        self._pieces.append(Piece(one.name, one.stop - one.start, digest.hexdigest()))

    @property
    def record(self) -> FileRecord:
        """The checksums, after all bytes were taken."""
        pieces = tuple(self._pieces)
        return FileRecord(path=self._path, size_bytes=self._size_bytes, pieces=pieces)


def _write(location: FileTree, sidecar: str, files: list[FileRecord]) -> None:
    manifest = Manifest(
        step=0,
        created_s=time.time(),
        world_size=1,
        iobench=__version__,
        writer={"name": location.writer.name, "options": {}},
        format="verify",
        files=tuple(files),
    )
    location.writer.write(FileImage.of(sidecar, [manifest.to_json()]), location.home)


def verify_against(
    path: str | Path,
    other: str | Path,
    *,
    writer: Writer | str | None = None,
    values: bool = False,
    progress: OnRead | None = None,
) -> VerifyReport:
    """Compare every tensor of the checkpoint at `path` with that of the same name at `other`.

    Both may have any format and any number of shards; see `verify` for the other arguments. If no
    name is in both, the prefix that all names of a side have is left out. Needs memory for two
    tensors. Raises UsageError if they have no tensor in common, and TransferError.
    """
    began = time.perf_counter()
    sides = [inventory_of(FileTree(one, writer_for(one, writer))) for one in (path, other)]
    found = sides[0]
    found.findings += [replace(one, path=f"{other}/{one.path}") for one in sides[1].findings]
    first, second = map(_by_name, sides)
    if not first.keys() & second.keys():
        first, second = _without_prefix(first), _without_prefix(second)
    common = first.keys() & second.keys()
    if not common:
        shown = " and ".join(min(names, default="none at all") for names in (first, second))
        raise UsageError(
            f"{path} and {other} have no tensor of the same name: the first are {shown}"
        )
    for name in sorted(first.keys() - common):
        found.error(_file(first[name]), f"is not in {other}", name)
    for name in sorted(second.keys() - common):
        found.error(f"{other}/{_file(second[name])}", f"is not in {path}", name)
    counts, done = ValueCounts(), 0
    total = sum(_size(first[name]) for name in common)
    for name in sorted(common, key=lambda name: first[name].parts[:1]):
        one, same = first[name], second[name]
        what = _difference(sides, one, same, str(other), counts if values else None)
        if what:
            found.error(_file(one), what, name)
        done += _size(one)
        if progress is not None:
            progress(done, total)
    return VerifyReport(
        findings=tuple(found.findings),
        kinds=(*found.kinds, *sides[1].kinds),
        files=sum(len(side.files) for side in sides),
        tensors=len(common),
        size_bytes=2 * total,
        proved_bytes=0,
        elapsed_s=time.perf_counter() - began,
        unproved={},
        values=counts.summary(found) if values else None,
    )


def _by_name(inventory: VerifyInventory) -> dict[str, ListedTensor]:
    """Return the tensors by name, with the file where several files have this name."""
    names = Counter(one.name for one in inventory.tensors)
    return {
        one.name if names[one.name] == 1 else f"{_file(one)}:{one.name}": one
        for one in inventory.tensors
    }


def _read(tree: FileTree, tensor: ListedTensor) -> Bytes:
    """Return the bytes of a tensor, contiguous, from all its parts."""
    dtype = np.dtype((np.void, torch_dtype(tensor.dtype).itemsize))
    parts = [(part, _read_part(tree, part)) for part in tensor.parts if part.start < part.stop]
    if len(parts) == 1 and parts[0][0].sizes == tensor.shape and not parts[0][0].strides:
        return parts[0][1]
    whole = np.zeros(tensor.shape, dtype=dtype)
    for part, data in parts:
        box = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.sizes, strict=True))
        if part.strides is None:
            whole[box] = data.view(dtype).reshape(part.sizes)
        else:
            steps = tuple(step * dtype.itemsize for step in part.strides)
            whole[box] = np.ndarray(part.sizes, dtype, data.data, 0, steps)
    return whole.reshape(-1).view(np.uint8)


def _read_part(tree: FileTree, part: TensorPart) -> Bytes:
    room = room_for(part.start, part.stop)
    image = WindowImage(part.file, tree.sizes[part.file], part.start, room)
    tree.writer.read(image, tree.home, start=part.start, stop=part.stop)
    return room


def _file(tensor: ListedTensor) -> str:
    return tensor.parts[0].file if tensor.parts else "."


def _size(tensor: ListedTensor) -> int:
    return sum(part.stop - part.start for part in tensor.parts)


def _without_prefix(tensors: dict[str, ListedTensor]) -> dict[str, ListedTensor]:
    names = sorted(tensors)
    same = zip(names[0].split("."), names[-1].split("."), strict=False) if names else ()
    count = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], same))
    return {".".join(name.split(".")[count:]): one for name, one in tensors.items()}


def _difference(
    sides: list[VerifyInventory],
    one: ListedTensor,
    same: ListedTensor,
    other: str,
    counts: ValueCounts | None,
) -> str:
    """Return how two tensors differ; an empty string if they are equal."""
    if (one.dtype, one.shape) != (same.dtype, same.shape):
        here, there = (f"{t.dtype} {list(t.shape)}" for t in (one, same))
        return f"is {here}, but {there} in {other}"
    try:
        data, expected = (
            _read(side.location, t) for side, t in zip(sides, (one, same), strict=True)
        )
    except (DataMismatchError, TransferError) as error:
        return unreadable(error)
    if counts is not None:
        counts.count(_file(one), one, data)
    if np.array_equal(data, expected):
        return ""
    width = torch_dtype(one.dtype).itemsize
    differs = (data != expected).reshape(-1, width).any(axis=1)
    return f"{int(np.count_nonzero(differs))} of {len(differs)} values differ from {other}"
