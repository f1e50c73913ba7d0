"""Reshaping a rank's files: the same tensors in another format, in one file or in many.

Whether one big file or many small ones are faster, and what a serializer costs, can be asked of any
workload. Sizes are computed as for layouts; names stay unless files that are merged share some.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self, get_args

from iobench.errors import OptionError, UnknownNameError
from iobench.units import format_size_exact, parse_size
from iobench.workloads.layouts.layout import dcp_file, safetensors_file, torch_file
from iobench.workloads.specs import FileFormat, FileSpec, TensorSpec

__all__ = ["Granularity", "Shape"]

_KINDS = ("blob", "shard", "layer", "tensor")
_SHARD_BYTES = 5 * 10**9  # transformers' max_shard_size
_LAYER = re.compile(r"(?:^|[./])(?:layers?|h|blocks?)[./](\d+)(?:[./]|$)")
_SUFFIX = {"safetensors": "safetensors", "torch": "pt", "dcp": "distcp", "raw": "bin"}


@dataclass(frozen=True, kw_only=True)
class Granularity:
    """How tensors are dealt to files: all in one, in shards of some size, by layer, or singly."""

    kind: str
    shard_bytes: int = _SHARD_BYTES

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `blob`, `shard=5GB`, `shard`, `layer` or `tensor`. Raises UsageError's kin."""
        kind, equals, size = text.partition("=")
        if kind not in _KINDS:
            raise UnknownNameError("granularity", kind, _KINDS)
        if equals and kind != "shard":
            raise OptionError(f"--granularity {text}: only shard takes a size")
        shard_bytes = parse_size(size) if equals else _SHARD_BYTES
        if shard_bytes <= 0:
            raise OptionError(f"--granularity {text}: a shard must have some bytes")
        return cls(kind=kind, shard_bytes=shard_bytes)

    def __str__(self) -> str:
        size = f"={format_size_exact(self.shard_bytes)}" if self.kind == "shard" else ""
        return f"{self.kind}{size}"

    def deal(self, tensors: Sequence[TensorSpec]) -> dict[str, list[TensorSpec]]:
        """File stem -> its tensors, in their order; a tensor larger than a shard has its own."""
        if self.kind == "blob":
            return {"blob": list(tensors)}
        if self.kind == "tensor":
            return {f"tensor-{i:05}": [tensor] for i, tensor in enumerate(tensors)}
        dealt: dict[str, list[TensorSpec]] = {}
        if self.kind == "layer":
            for tensor in tensors:
                found = _LAYER.search(tensor.name)
                dealt.setdefault(f"layer-{found[1]}" if found else "rest", []).append(tensor)
            return dealt
        used = 0
        for tensor in tensors:
            if not dealt or used + tensor.size_bytes > self.shard_bytes:
                dealt[f"shard-{len(dealt):05}"], used = [], 0
            dealt[f"shard-{len(dealt) - 1:05}"].append(tensor)
            used += tensor.size_bytes
        return dealt


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What to make of a workload's files; None leaves them as the layout has them."""

    serializer: FileFormat | None = None
    granularity: Granularity | None = None

    @classmethod
    def parse(cls, serializer: str | None, granularity: str | None) -> Self:
        """From `--serializer` and `--granularity`. Raises UnknownNameError, OptionError."""
        known = get_args(FileFormat)
        if serializer is not None and serializer not in known:
            raise UnknownNameError("serializer", serializer, known)
        return cls(
            serializer=serializer,  # type: ignore[arg-type]
            granularity=None if granularity is None else Granularity.parse(granularity),
        )

    def apply(self, files: Sequence[FileSpec]) -> tuple[FileSpec, ...]:
        """`files` reshaped. Dealt anew without a serializer, all get the largest file's format."""
        if self.granularity is None:
            if self.serializer is None:
                return tuple(files)
            return tuple(_file(spec.path, self.serializer, spec.tensors) for spec in files)
        largest = max(files, key=lambda spec: spec.size_bytes)
        file_format = self.serializer or largest.format
        dealt = self.granularity.deal(list(_named(files)))
        return tuple(
            _file(f"{stem}.{_SUFFIX[file_format]}", file_format, tensors)
            for stem, tensors in dealt.items()
        )


def _named(files: Sequence[FileSpec]) -> Iterator[TensorSpec]:
    """All tensors; with their file's path before their names where any two share one."""
    names = Counter(tensor.name for spec in files for tensor in spec.tensors)
    shared = max(names.values()) > 1
    for spec in files:
        for tensor in spec.tensors:
            yield replace(tensor, name=f"{spec.path}/{tensor.name}") if shared else tensor


def _file(path: str, file_format: FileFormat, tensors: Iterable[TensorSpec]) -> FileSpec:
    if file_format == "safetensors":
        return safetensors_file(path, tensors)
    if file_format == "torch":
        return torch_file(path, tensors)
    if file_format == "dcp":
        return dcp_file(path, tensors, exact=True)
    listed = tuple(tensors)
    size = sum(tensor.size_bytes for tensor in listed)
    return FileSpec(path=path, format="raw", tensors=listed, size_bytes=size, exact=True)
