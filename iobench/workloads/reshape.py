"""Reshaping of a rank's files: the same tensors in another format, in one file or in many.

With it any workload can compare one large file with many small ones, and measure the cost of a
serializer. Sizes are computed like those of layouts. Names stay the same unless merged files share
a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self, get_args

from iobench.errors import OptionError, UnknownNameError
from iobench.units import format_size_exact, parse_size
from iobench.workloads.layouts.huggingface import split_shards
from iobench.workloads.layouts.layout import file_of
from iobench.workloads.specs import FileFormat, FileSpec, TensorSpec

_KINDS = ("blob", "shard", "layer", "tensor")
_SHARD_BYTES = 5 * 10**9  # transformers' max_shard_size
_LAYER = re.compile(r"(?:^|[./])(?:layers?|h|blocks?)[./](\d+)(?:[./]|$)")
SUFFIXES = {"safetensors": "safetensors", "torch": "pt", "dcp": "distcp", "raw": "bin"}
"""The suffix of a file's name by its format."""


@dataclass(frozen=True, kw_only=True)
class Granularity:
    """Distribution of tensors over files: one file, shards of a size, one per layer or tensor."""

    kind: str
    shard_bytes: int = _SHARD_BYTES

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `blob`, `shard=5GB`, `shard`, `layer` or `tensor`.

        Raises UnknownNameError or OptionError.
        """
        kind, equals, size = text.partition("=")
        if kind not in _KINDS:
            raise UnknownNameError("granularity", kind, _KINDS)
        if equals and kind != "shard":
            raise OptionError(f"--granularity {text}: only shard takes a size, as in shard=5GB")
        shard_bytes = parse_size(size, "--granularity shard=") if equals else _SHARD_BYTES
        if shard_bytes <= 0:
            raise OptionError(f"--granularity {text}: a shard must have at least 1 byte")
        return cls(kind=kind, shard_bytes=shard_bytes)

    def __str__(self) -> str:
        size = f"={format_size_exact(self.shard_bytes)}" if self.kind == "shard" else ""
        return f"{self.kind}{size}"

    def deal(self, tensors: Iterable[TensorSpec]) -> Iterator[tuple[str, list[TensorSpec]]]:
        """Yield file stem and tensors in order. A tensor above the shard size has its own file."""
        if self.kind == "blob":
            yield "blob", list(tensors)
        elif self.kind == "tensor":
            for number, tensor in enumerate(tensors):
                yield f"tensor-{number:05}", [tensor]
        elif self.kind == "layer":
            dealt: dict[str, list[TensorSpec]] = {}
            for tensor in tensors:
                found = _LAYER.search(tensor.name)
                dealt.setdefault(f"layer-{found[1]}" if found else "rest", []).append(tensor)
            yield from dealt.items()
        else:
            for number, shard in enumerate(split_shards(tensors, self.shard_bytes)):
                yield f"shard-{number:05}", shard


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Requested format and distribution of a workload's files; None keeps those of the layout."""

    serializer: FileFormat | None = None
    granularity: Granularity | None = None

    @classmethod
    def parse(cls, serializer: str | None, granularity: str | None) -> Self:
        """Parse `--serializer` and `--granularity`. Raises UnknownNameError, OptionError."""
        known: dict[str, FileFormat] = {name: name for name in get_args(FileFormat)}
        if serializer is not None and serializer not in known:
            raise UnknownNameError("serializer", serializer, known)
        return cls(
            serializer=None if serializer is None else known[serializer],
            granularity=None if granularity is None else Granularity.parse(granularity),
        )

    def apply(self, files: Sequence[FileSpec]) -> tuple[FileSpec, ...]:
        """Return `files` reshaped. The default format of new files is that of the largest file."""
        if self.granularity is None:
            if self.serializer is None:
                return tuple(files)
            return tuple(file_of(spec.path, self.serializer, spec.tensors) for spec in files)
        if not files:  # a rank that writes none
            return ()
        largest = max(files, key=lambda spec: spec.size_bytes)
        file_format = self.serializer or largest.format
        return tuple(
            file_of(f"{stem}.{SUFFIXES[file_format]}", file_format, tensors)
            for stem, tensors in self.granularity.deal(_named(files))
        )


def _named(files: Sequence[FileSpec]) -> Iterator[TensorSpec]:
    """Yield all tensors. If two share a name, prefix every name with the path of its file."""
    count = sum(len(spec.tensors) for spec in files)
    shared = len({tensor.name for spec in files for tensor in spec.tensors}) < count
    for spec in files:
        for tensor in spec.tensors:
            yield replace(tensor, name=f"{spec.path}/{tensor.name}") if shared else tensor
