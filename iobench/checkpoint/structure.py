"""Structure: what the files of a checkpoint have in common with those of the next one.

The states of one training differ in their bytes and plain values only. So the names, the header,
the layout of the tensor file and the JSON around the plain values are made once. They serve every
later state that equals the first one in all that they depend on (docs/decisions/0040).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from iobench.checkpoint.aliases import ALIGNMENT
from iobench.checkpoint.state_tree import FlatState, plain_text
from iobench.checkpoint.tree_spec import Collected
from iobench.errors import StateError
from iobench.formats.many_parts import ScatteredImage
from iobench.formats.safetensors_header import header_bytes
from iobench.formats.tensor_layouts import FileLayout, Located, TensorLayouts, numbers
from iobench.formats.tensors import tensor_bytes
from iobench.writers.image import Bytes

__all__ = ["LeafPlace", "Structure"]


class LeafPlace(NamedTuple):
    """A leaf of the tensor file. `tensor` or `array` is its number in the state, the other is -1.

    A `whole` leaf is that tensor. Any other one is memory that several tensors share, and begins
    `shift` bytes after that tensor. `reach_bytes` is the memory that a tensor spans. It differs
    from `size_bytes` for some tensors that are not contiguous.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    array: int = -1
    tensor: int = -1
    whole: bool = True
    shift: int = 0
    contiguous: bool = True
    reach_bytes: int = 0


class Structure:
    """Layout of the tensor file and JSON of the skeleton, without the values of the state.

    `names` are those of all tensors, `rows` the leaves in file order, `places` their [begin, end)
    in bytes after the header. `size_bytes` is the size of the tensor file, and `pieces` are (name,
    bytes) of its parts, "" for the header. It keeps no tensor alive.
    """

    def __init__(self, flat: FlatState) -> None:
        """Raises StateError for a state that the format cannot hold."""
        described = [(name, leaf.dtype, leaf.shape) for name, leaf in flat.leaves.items()]
        try:
            header, self.places = header_bytes(described)
        except ValueError as error:
            raise StateError(str(error)) from error
        tensors = list(flat.tensors.values())
        self.names = list(flat.tensors)
        self.layouts = TensorLayouts(tensors)
        self.rows = _rows(flat, self.places, self.layouts.reaches)
        self.pieces = [("", len(header)), *((row.name, row.size_bytes) for row in self.rows)]
        self.size_bytes = sum(size for _, size in self.pieces)
        self.on_cpu = all(tensor.is_cpu for tensor in tensors)
        self._spec = flat.spec
        self._texts, self._order = flat.template() if flat.spec else ([], [])
        stored = [row for row in self.rows if row.size_bytes]
        self._file = FileLayout(header, [row.size_bytes for row in stored])
        self._tensors = numbers(map(attrgetter("tensor"), stored))
        self._shifts = numbers(map(attrgetter("shift"), stored))
        self._reaches = numbers(map(attrgetter("reach_bytes"), stored))
        self._shared = np.flatnonzero([not row.whole for row in stored])
        self._apart = [
            (at, row) for at, row in enumerate(stored) if row.array >= 0 or not row.contiguous
        ]
        number = {name: at for at, name in enumerate(flat.tensors)}
        row_of = {row.name: row.tensor for row in self.rows}
        self._members = numbers(number[name] for name in flat.views)
        self._bases = numbers(row_of[view.leaf] for view in flat.views.values())
        addresses = numbers(tensor.data_ptr() for tensor in tensors)
        self._distances = addresses[self._members] - addresses[self._bases]

    @property
    def header(self) -> Bytes:
        """The header of the tensor file."""
        return self._file.header

    @property
    def comparable(self) -> bool:
        """Whether `collect` and `has_aliases_of` can tell that a state has this structure."""
        # Shared memory on a device is copied through a tensor on a storage that contains all of it.
        return self._spec is not None and (self.on_cpu or not len(self._shared))

    def collect(self, state: Any) -> Collected | None:
        """Return the tensors, arrays and plain values of a state; None for another structure.

        The tensors are not compared yet.
        """
        found = Collected(encode=plain_text)
        return found if self._spec and self._spec.match(state, found) else None

    def skeleton(self, texts: Mapping[int, str]) -> str:
        """Return the JSON of the skeleton with `texts` as the plain values, by number."""
        parts = [""] * (2 * len(self._order) + 1)
        parts[::2] = self._texts
        parts[1::2] = [texts[number] for number in self._order]
        return "".join(parts)

    def has_aliases_of(self, located: Located) -> bool:
        """Whether the tensors share memory like those of the first state, and no other ones do.

        False for overlapping memory of several storages, which torch.from_numpy can make.
        """
        # The last element is for the number -1, which arrays have.
        addresses = numbers([*located.addresses, 0])
        storages = numbers([*located.storages, 0])
        moved = addresses[self._members] - addresses[self._bases] != self._distances
        parted = storages[self._members] != storages[self._bases]
        starts = addresses[self._tensors] + self._shifts
        odd = ((starts - storages[self._tensors]) % ALIGNMENT)[self._shared]
        if moved.any() or parted.any() or odd.any():
            return False
        begins, reaches = starts[self._tensors >= 0], self._reaches[self._tensors >= 0]
        order = np.argsort(begins)
        begins, ends = begins[order], (begins + reaches)[order]
        return not (begins[1:] < ends[:-1]).any()

    def image(
        self, path: str, located: Located, tensors: list[torch.Tensor], arrays: list[Bytes]
    ) -> ScatteredImage:
        """Return the tensor file on the memory of a CPU state."""
        addresses = numbers([*located.addresses, 0])[self._tensors] + self._shifts
        apart = {
            at: arrays[row.array] if row.array >= 0 else tensor_bytes(tensors[row.tensor])
            for at, row in self._apart
        }
        return self._file.image(path, addresses, apart, owners=located.owners)


def _rows(flat: FlatState, names: Iterable[str], reaches: list[int]) -> list[LeafPlace]:
    tensors = list(flat.tensors.values())
    number = {name: at for at, name in enumerate(flat.tensors)}
    array = {name: at for at, name in enumerate(flat.arrays)}
    members: dict[str, list[int]] = {}
    for name, view in flat.views.items():
        members.setdefault(view.leaf, []).append(number[name])
    rows = list[LeafPlace]()
    for name in names:
        leaf = flat.leaves[name]
        dtype, shape, size, source = leaf
        if not isinstance(source, torch.Tensor):
            rows.append(LeafPlace(name, dtype, shape, size, array=array[name]))
        elif source is tensors[at := number[name]]:
            contiguous, reach = source.is_contiguous(), reaches[at]
            rows.append(LeafPlace(name, dtype, shape, size, -1, at, True, 0, contiguous, reach))
        else:
            # Two storages can begin at one address: the largest one contains the whole leaf.
            at = max(members[name], key=lambda one: tensors[one].untyped_storage().nbytes())
            shift = source.data_ptr() - tensors[at].data_ptr()
            rows.append(LeafPlace(name, dtype, shape, size, -1, at, False, shift, reach_bytes=size))
    return rows
