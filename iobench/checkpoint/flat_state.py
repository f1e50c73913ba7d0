"""FlatState: a training state as a skeleton for JSON and named leaves for a tensor file."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from typing import Any

import torch

from iobench.checkpoint.aliases import Leaf, View
from iobench.checkpoint.tree_spec import TreeSpec, json_text, quick_json_text
from iobench.formats.tensor_layouts import TensorLayouts

__all__ = ["FlatState", "PlainValue"]

PlainValue = tuple[Any, Any]
"""A container of the skeleton, and the key or index of a plain value in it."""


@dataclass(frozen=True, kw_only=True)
class FlatState:
    """A flattened state: `skeleton` for JSON, `leaves` by name for the tensor file.

    `tensors` are the tensors of the state by name, of `layouts`. Several of them may share one
    leaf, and `views` are those that are not a whole leaf. `spec` describes the structure, with the
    `plain` values of the skeleton by number; it is None for a state that cannot be compared with
    another one.
    """

    skeleton: Any = field(repr=False)
    leaves: dict[str, Leaf]
    tensors: dict[str, torch.Tensor] = field(repr=False)
    layouts: TensorLayouts = field(repr=False)
    views: dict[str, View]
    arrays: dict[str, Leaf]
    spec: TreeSpec | None
    plain: list[PlainValue] = field(repr=False)
    per_rank: frozenset[int] = frozenset()
    """Numbers of the plain values that are inside of a PerRank."""

    def template(self) -> tuple[list[str], list[int]]:
        """Return the JSON of the skeleton around the plain values, and their numbers in order."""
        mark, values = secrets.token_hex(16), [container[key] for container, key in self.plain]
        for number, (container, key) in enumerate(self.plain):
            container[key] = f"{mark}{number}"
        parts = re.split(f'"{mark}([0-9]+)"', quick_json_text(self.skeleton))
        for (container, key), value in zip(self.plain, values, strict=True):
            container[key] = value
        return parts[::2], list(map(int, parts[1::2]))

    def plain_texts(self) -> list[str]:
        """Return the JSON of the plain values."""
        return [json_text(container[key]) for container, key in self.plain]
