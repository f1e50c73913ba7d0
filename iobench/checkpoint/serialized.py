"""Serialized: a training state as the files of a checkpoint, before any copy."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from iobench.checkpoint.aliases import Leaf
from iobench.checkpoint.state_tree import flatten
from iobench.errors import StateError
from iobench.formats.safetensors_header import header_bytes
from iobench.writers.image import Bytes, FileImage

__all__ = ["SKELETON", "TENSORS", "Serialized"]

TENSORS = "tensors.safetensors"
"""The file of all tensors and arrays; the safetensors library reads it too."""

SKELETON = "state.json"
"""The file of everything else, see `state_tree`."""

_Described = tuple[tuple[str, str, tuple[int, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class Serialized:
    """Contents of the files `TENSORS` and `SKELETON`. The leaves are still the trainer's memory.

    `tensors` are the tensors of the state; several of them may share one leaf. `header` and
    `places` describe the tensor file: `places` maps a name to [begin, end), in bytes after the
    header.
    """

    skeleton: Any = field(repr=False)
    leaves: Mapping[str, Leaf]
    tensors: Mapping[str, torch.Tensor] = field(repr=False)
    header: bytes = field(repr=False)
    places: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, state: Any) -> Serialized:
        """Serialize `state`. Raises StateError with the path of what cannot be saved."""
        flat = flatten(state)
        described = tuple((name, leaf.dtype, leaf.shape) for name, leaf in flat.leaves.items())
        try:
            header, places = _header(described)
        except ValueError as error:
            raise StateError(str(error)) from error
        return cls(
            skeleton=flat.skeleton,
            leaves=flat.leaves,
            tensors=flat.tensors,
            header=header,
            places=places,
        )

    @property
    def size_bytes(self) -> int:
        """Size of the tensor file."""
        return len(self.header) + sum(leaf.size_bytes for leaf in self.leaves.values())

    @property
    def on_cpu(self) -> bool:
        return all(leaf.on_cpu for leaf in self.leaves.values())

    @property
    def pieces(self) -> list[tuple[str, int]]:
        """(name, bytes) of each part of the tensor file, in file order; "" is the header."""
        sizes = [(name, end - begin) for name, (begin, end) in self.places.items()]
        return [("", len(self.header)), *sizes]

    def image(self) -> FileImage:
        """Return the tensor file on the trainer's own CPU memory: no copy. It must not change."""
        views = [self.leaves[name].cpu_bytes() for name in self.places]
        return FileImage.of(TENSORS, [self.header, *views])

    def image_in(self, memory: Bytes) -> FileImage:
        """Return the tensor file whose snapshot begins at the first byte of `memory`."""
        return FileImage.of(TENSORS, [memory[: self.size_bytes]])

    def with_arrays_copied(self) -> Serialized:
        """Return the same with copies of the numpy arrays, which the trainer may change at once."""
        leaves = {
            name: leaf
            if isinstance(leaf.source, torch.Tensor)
            else leaf._replace(source=leaf.source.copy())
            for name, leaf in self.leaves.items()
        }
        return replace(self, leaves=leaves)

    def skeleton_image(self) -> FileImage:
        text = json.dumps(self.skeleton, separators=(",", ":"), allow_nan=False)
        return FileImage.of(SKELETON, [np.frombuffer(text.encode(), dtype=np.uint8)])


@functools.lru_cache(maxsize=4)
def _header(described: _Described) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Cached between saves: the structure of a state rarely changes."""
    return header_bytes(described)
