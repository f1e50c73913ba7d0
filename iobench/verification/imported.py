"""A checkpoint on disk as a workload: its files and tensors, of which only headers are read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any

from iobench import workloads
from iobench.errors import WorkloadFileError
from iobench.units import count_of
from iobench.workloads.layouts.layout import file_of
from iobench.workloads.listed import RESERVED, line_of
from iobench.workloads.reshape import SUFFIXES
from iobench.workloads.specs import FileFormat, TensorSpec
from iobench.workloads.workload import Workload
from iobench.writers.s3_store.target import is_s3

if TYPE_CHECKING:
    from iobench.verification.inventory import ListedTensor, TensorPart, VerifyInventory

_YAML = (".yaml", ".yml")
_BETWEEN = 4096
"""Bytes of a file that belong to no tensor and are no header: more are replayed as a tensor."""
_HEADER = 128
"""The same of each tensor: the sizes of torch's pickles are estimates."""
_REST = "bytes of no tensor"


def is_path(text: str) -> bool:
    """Return whether `text` is the path of a workload, and not a name.

    A name of the catalogue stays one where a file has it too: `./llama7b` is the file.
    """
    if os.sep in text or text.endswith(_YAML):
        return True
    return text not in workloads.names() and os.path.exists(text)


def load_workload(name_or_path: str | os.PathLike[str]) -> Workload:
    """Return a workload by name, from a YAML file, or from a checkpoint that `verify` understands.

    A checkpoint is a directory, a file or `s3://bucket/prefix`. Raises what `workloads.load` and
    `document_of` raise.
    """
    text = os.fspath(name_or_path)
    if text.endswith(_YAML) or not is_path(text):
        return workloads.load(text)
    from iobench.workloads.catalogue import built

    return built(document_of(text, anonymous=False), Path(text), _name(text))


def document_of(path: str, *, anonymous: bool) -> dict[str, Any]:
    """Return the checkpoint at `path` as the content of a workload file.

    Nothing but indexes and headers is read. With `anonymous`, files and tensors have neutral names
    of the same length, so that headers keep their sizes. Raises TargetError if there is nothing,
    WorkloadFileError for what is damaged or no checkpoint, and TransferError.
    """
    from iobench.verification.directories import SIDECAR, inventory_of
    from iobench.verification.inventory import FileTree
    from iobench.verification.verify import writer_for
    from iobench.workloads.schema import SCHEMA

    location = FileTree(path, writer_for(path, None))
    inventory = inventory_of(location, headers_only=True)
    damage = [one for one in inventory.findings if one.severity == "error"]
    if damage:
        raise WorkloadFileError(
            f"{path} is damaged: {damage[0]}; iobench verify {path} lists everything that is"
        )
    if not inventory.files:
        raise WorkloadFileError(
            f"{path} is neither a workload (*.yaml) nor a checkpoint: iobench reads checkpoints of "
            "iobench, *.safetensors, *.pt, *.pth, *.bin, *.ckpt and DCP directories"
        )
    files = [
        (name, size, *_contents(name, inventory))
        for name, size in sorted(inventory.sizes.items())
        if size >= 0 and not name.endswith(SIDECAR)
    ]
    count = sum(len(tensors) for *_, tensors in files)
    what = f"{count_of(len(files), 'file')} with {count_of(count, 'tensor')}"
    entries = [_entry(*file) for file in (_without_names(files) if anonymous else files)]
    return {
        "schema": SCHEMA,
        "description": what,
        "source": "headers of a checkpoint" + ("" if anonymous else f", {_name(path)}"),
        "files": entries,
    }


def _name(path: str) -> str:
    """Return the name of a checkpoint: that of its directory or file."""
    plain = path.rstrip("/") if is_s3(path) else os.path.abspath(path)
    return plain.rpartition("/")[2] or "checkpoint"


_File = tuple[str, int, FileFormat, list[TensorSpec]]
"""Path, bytes, format and tensors."""


def _contents(path: str, inventory: VerifyInventory) -> tuple[FileFormat, list[TensorSpec]]:
    """Return the format and the tensors of a file; a file without known tensors is raw."""
    listed = inventory.files.get(path)
    if listed is None or not listed.parts:
        return "raw", []
    suffix = path.rpartition(".")[2]
    known: dict[str, FileFormat] = {"safetensors": "safetensors", "distcp": "dcp"}
    file_format = known.get(suffix, "torch")
    tensors = list(_tensors(listed.in_order(), file_format))
    if file_format != "dcp":
        rest = inventory.sizes[path] - file_of(path, file_format, tensors, 0).size_bytes
        if rest > _BETWEEN + _HEADER * len(tensors):
            tensors.append(TensorSpec(name=_REST, dtype="uint8", shape=(rest,)))
    return file_format, tensors


def _entry(
    path: str, size_bytes: int, file_format: FileFormat, tensors: list[TensorSpec]
) -> dict[str, Any]:
    entry: dict[str, Any] = {"path": f"{path}.raw" if path == RESERVED else path}
    if file_format != "raw":
        entry["format"] = file_format
    if file_format in ("raw", "dcp"):
        entry["size_bytes"] = size_bytes
    return entry | ({"tensors": "\n".join(map(line_of, tensors))} if tensors else {})


def _without_names(files: Sequence[_File]) -> Iterator[_File]:
    """Yield the files with names that say nothing, of the same lengths and in the same order.

    So headers keep their sizes: they have each name, and offsets that depend on the order.
    """
    folders = _labels(one for path, *_ in files for one in path.split("/")[:-1])
    names = _labels(path for path, *_ in files)
    tensors = _labels(one.name for *_, listed in files for one in listed)
    for path, size, file_format, listed in files:
        *above, name = path.split("/")
        stem = name.rpartition(".")[0] or name  # which torch writes into the file, if it is ASCII
        length = len(stem if path.isascii() else "archive")
        label = f"{names[path].ljust(length, '_')}.{SUFFIXES[file_format]}"
        made = [folders[one].ljust(len(one), "_") for one in above]
        neutral = [replace(one, name=_like(one.name, tensors)) for one in listed]
        yield "/".join((*made, label)), size, file_format, neutral


def _labels(names: Iterable[str]) -> dict[str, str]:
    """Return `a`, `b`, ... for the names in their order."""
    listed = sorted({*names})
    letters = 1
    while 26**letters < len(listed):
        letters += 1
    labels = map("".join, product(ascii_lowercase, repeat=letters))
    return dict(zip(listed, labels, strict=False))


def _like(name: str, labels: Mapping[str, str]) -> str:
    """Return the label of a tensor's name, which takes as many bytes in a header."""
    return labels[name].ljust(len(json.dumps(name, ensure_ascii=False).encode()) - 2, "_")


def _tensors(
    parts: Iterable[tuple[ListedTensor, TensorPart]], file_format: FileFormat
) -> Iterator[TensorSpec]:
    """Yield the tensors of a file."""
    taken: set[str] = {_REST}
    for tensor, part in parts:
        name = tensor.name
        if file_format == "torch":  # a path through dicts, whose parts of digits are numbers
            name = name.replace("/", ".")
            name = f"tensor {name}" if name.isdigit() else name
        if name in taken:
            name = f"{name} at {part.start}"
        taken.add(name)
        shape = tuple(part.sizes)
        if part.stop - part.start != _size_bytes(tensor.dtype, shape):
            yield TensorSpec(name=name, dtype="uint8", shape=(part.stop - part.start,))
        else:
            yield TensorSpec(name=name, dtype=tensor.dtype, shape=shape)


def _size_bytes(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Return the bytes of a tensor; None for a dtype that workloads lack."""
    try:
        return TensorSpec(name="", dtype=dtype, shape=shape).size_bytes
    except KeyError:
        return None
