"""against: two checkpoints, tensor by tensor, whatever their formats."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

from iobench.errors import DataMismatchError, TransferError, UsageError
from iobench.formats.many_parts import WindowImage
from iobench.formats.tensor_slices import room_for
from iobench.formats.tensors import torch_dtype
from iobench.verification.directories import inventory_of
from iobench.verification.file_tree import FileTree, unreadable
from iobench.verification.inventory import ListedTensor, TensorPart, VerifyInventory, VerifyReport
from iobench.verification.reading import OnRead
from iobench.verification.values import ValueCounts
from iobench.verification.verify import writer_for
from iobench.writers.base import Writer
from iobench.writers.image import Bytes


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
