"""Serialized: a training state as the files of a checkpoint, not yet copied anywhere."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from iobench.checkpoint.aliases import Leaf
from iobench.checkpoint.state_tree import take_apart
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
    """What `TENSORS` and `SKELETON` will hold. The leaves are the trainer's own memory still.

    `tensors` are the state's tensors, several of which may lie in one leaf. `header` and `places`
    (name -> [begin, end) behind the header) describe the tensor file.
    """

    skeleton: Any = field(repr=False)
    leaves: Mapping[str, Leaf]
    tensors: Mapping[str, torch.Tensor] = field(repr=False)
    header: bytes = field(repr=False)
    places: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, state: Any) -> Serialized:
        """Raises StateError, naming the path, for a state that cannot be saved."""
        taken = take_apart(state)
        described = tuple((name, leaf.dtype, leaf.shape) for name, leaf in taken.leaves.items())
        try:
            header, places = _header(described)
        except ValueError as error:
            raise StateError(str(error)) from error
        return cls(
            skeleton=taken.skeleton,
            leaves=taken.leaves,
            tensors=taken.tensors,
            header=header,
            places=places,
        )

    @property
    def size_bytes(self) -> int:
        """Of the tensor file."""
        return len(self.header) + sum(leaf.size_bytes for leaf in self.leaves.values())

    @property
    def on_cpu(self) -> bool:
        return all(leaf.on_cpu for leaf in self.leaves.values())

    @property
    def pieces(self) -> list[tuple[str, int]]:
        """(name, bytes) of what stands in the tensor file, in order; "" is the header."""
        sizes = [(name, end - begin) for name, (begin, end) in self.places.items()]
        return [("", len(self.header)), *sizes]

    def image(self) -> FileImage:
        """The tensor file on the trainer's memory (CPU): zero copies, as long as it holds still."""
        views = [self.leaves[name].cpu_bytes() for name in self.places]
        return FileImage.of(TENSORS, [self.header, *views])

    def image_in(self, memory: Bytes) -> FileImage:
        """The tensor file where a snapshot of it lies, from the first byte of `memory` on."""
        return FileImage.of(TENSORS, [memory[: self.size_bytes]])

    def with_arrays_copied(self) -> Serialized:
        """The same with copies of the numpy arrays, which nobody promises to leave alone."""
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
    """Kept from save to save: a state rarely changes its form."""
    return header_bytes(described)
