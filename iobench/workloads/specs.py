"""Specification of a checkpoint file: tensors by name, dtype and shape, format and size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Annotated, Literal

from msgspec import Meta

from iobench.formats.safetensors_header import DTYPES

FileFormat = Literal["safetensors", "torch", "dcp", "raw"]
Text = Annotated[str, Meta(min_length=1)]
Size = Annotated[int, Meta(ge=1)]
"""Bytes, written as in `iobench.units` in YAML: 5GB, 4GiB, 1048576."""

SAFETENSORS_METADATA = {"format": "pt"}
"""`__metadata__` of every safetensors file of a workload, like that of transformers."""


def dtype_bytes(dtype: str) -> int:
    """Return bytes per element of a torch dtype name. Raises KeyError for an unknown name."""
    return 16 if dtype == "complex128" else DTYPES[dtype][1]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One tensor: its name in the file, torch dtype name and shape.

    In "torch" files `name` is the path through nested dicts, joined by "/". A part of only digits
    is an int key ("state/0/exp_avg"). In other formats it is the plain name, dots included.
    `split` is the dimension that tensor parallelism cuts when it loads the tensor, if any.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    split: int | None = None

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements alone."""
        return self.elements * dtype_bytes(self.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSpec:
    """One file of a checkpoint, `path` relative to the checkpoint's directory.

    `format` is "safetensors" (with SAFETENSORS_METADATA), "torch" (one zip archive of a nested
    dict), "dcp" (single-tensor archives, one after the other in this order), or "raw" (opaque
    bytes: one uint8 tensor "blob"). `size_bytes` is the size on storage. `exact` says whether the
    framework's file has exactly this size, or the size is an estimate.
    """

    path: str
    format: FileFormat
    tensors: tuple[TensorSpec, ...]
    size_bytes: int
    exact: bool

    @property
    def payload_bytes(self) -> int:
        """Bytes of the tensors alone, without headers, pickles and padding."""
        return sum(tensor.size_bytes for tensor in self.tensors)


def size_of(files: Iterable[FileSpec]) -> int:
    return sum(spec.size_bytes for spec in files)
