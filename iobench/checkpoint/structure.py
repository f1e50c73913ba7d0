"""Structure: what the files of a checkpoint have in common with those of the next one.

The states of one training differ in their bytes and plain values only. So the names, the header,
the layout of the tensor file and the JSON around the plain values are made once. They serve every
later state that equals the first one in all that they depend on (docs/decisions/0040).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from iobench.checkpoint.aliases import ALIGNMENT, Leaf
from iobench.checkpoint.manifest import Pieces
from iobench.checkpoint.state_tree import FlatState, Template
from iobench.errors import StateError
from iobench.formats.many_parts import Numbers, ScatteredImage
from iobench.formats.safetensors_header import header_bytes
from iobench.formats.tensor_layouts import FileLayout, Located, numbers
from iobench.formats.tensors import tensor_bytes
from iobench.writers.image import Bytes

__all__ = ["Structure"]


class _Part(NamedTuple):
    """A leaf of the tensor file that is not one whole tensor of the state.

    `array` is its number in the state, or -1 for memory that several tensors share. This memory
    begins `shift` bytes after the tensor with the number `tensor`.
    """

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    array: int = -1
    tensor: int = -1
    shift: int = 0

    def leaf(self, tensors: Sequence[torch.Tensor], arrays: Sequence[Bytes]) -> Leaf:
        """Return the leaf on the memory of a state."""
        if self.array >= 0:
            return Leaf(self.dtype, self.shape, self.size_bytes, arrays[self.array])
        tensor = tensors[self.tensor].detach()
        storage = tensor.untyped_storage()
        begin = tensor.data_ptr() + self.shift - storage.data_ptr()
        raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        raw.set_(storage, begin, (self.size_bytes,), (1,))
        return Leaf(self.dtype, self.shape, self.size_bytes, raw)


class Structure:
    """Layout of the tensor file and JSON of the skeleton, without the values of the state.

    `names` are those of all tensors. `size_bytes` is the size of the tensor file, and `pieces` are
    its parts in file order, "" for the header. It keeps no tensor alive, and has
    no object for each leaf, which the garbage collector would look at.
    """

    def __init__(self, flat: FlatState) -> None:
        """Raises StateError for a state that the format cannot hold."""
        described = [(name, leaf.dtype, leaf.shape) for name, leaf in flat.leaves.items()]
        try:
            header, sizes = header_bytes(described)
        except ValueError as error:
            raise StateError(str(error)) from error
        self.names = list(flat.tensors)
        self.layouts = flat.layouts
        self.pieces = Pieces([("", len(header)), *sizes.items()])
        self.size_bytes = sum(self.pieces.sizes)
        self.template = Template(flat)
        self._parts = _parts(flat)
        self._file = FileLayout(header, list(filter(None, sizes.values())))
        self._find_leaves([name for name, size in sizes.items() if size])
        self._find_views(flat)

    def _find_leaves(self, names: list[str]) -> None:
        """Find the memory of the leaves `names`, which are those in the file, in its order."""
        number = dict(zip(self.names, itertools.count()))
        # Of arrays it is -1: the number of one more tensor, at address 0.
        self._tensors = numbers(map(number.get, names, itertools.repeat(-1)))
        self._reaches = np.append(self.layouts.reaches, 0)[self._tensors]
        scattered = ~np.append(self.layouts.contiguous, True)[self._tensors]
        self._shifts = np.zeros_like(self._tensors)
        self._shared, self._apart = list[int](), list[tuple[int, int, int]]()
        for at, name in enumerate(names) if self._parts else ():
            part = self._parts.get(name)
            if part is None:
                continue
            self._tensors[at], self._shifts[at] = part.tensor, part.shift
            self._reaches[at], scattered[at] = part.size_bytes, False
            if part.array >= 0:
                self._apart.append((at, part.array, -1))
            else:
                self._shared.append(at)
        copied = np.flatnonzero(scattered).tolist()
        self._apart += [(at, -1, int(self._tensors[at])) for at in copied]

    def _find_views(self, flat: FlatState) -> None:
        """Find the tensors that share memory, and their distances in bytes."""
        number = {name: at for at, name in enumerate(self.names)} if flat.views else {}
        members = [number[name] for name in flat.views]
        bases = [
            self._parts[view.leaf].tensor if view.leaf in self._parts else number[view.leaf]
            for view in flat.views.values()
        ]
        tensors = list(flat.tensors.values()) if flat.views else []
        self._members, self._bases = numbers(members), numbers(bases)
        self._distances = numbers(
            tensors[member].data_ptr() - tensors[base].data_ptr()
            for member, base in zip(members, bases, strict=True)
        )

    @property
    def on_cpu(self) -> bool:
        """Whether all tensors are in host memory."""
        return self.layouts.on_cpu

    @property
    def header(self) -> Bytes:
        """The header of the tensor file."""
        return self._file.header

    @property
    def comparable(self) -> bool:
        """Whether `template` and `has_aliases_of` can tell that a state has this structure."""
        # Shared memory on a device is copied through a tensor on a storage that contains all of it.
        return self.template.comparable and (self.on_cpu or not len(self._shared))

    def has_aliases_of(self, located: Located) -> bool:
        """Whether the tensors share memory like those of the first state, and no other ones do.

        False for overlapping memory of several storages, which torch.from_numpy can make.
        """
        # The last element is for the number -1, which arrays have.
        addresses, storages = np.append(located.addresses, 0), np.append(located.storages, 0)
        moved = addresses[self._members] - addresses[self._bases] != self._distances
        parted = storages[self._members] != storages[self._bases]
        starts = addresses[self._tensors] + self._shifts
        odd = ((starts - storages[self._tensors]) % ALIGNMENT)[self._shared]
        if moved.any() or parted.any() or odd.any():
            return False
        whole = self._tensors >= 0
        return not _overlap(starts[whole], self._reaches[whole])

    def leaves(self, tensors: Sequence[torch.Tensor], arrays: Sequence[Bytes]) -> dict[str, Leaf]:
        """Return the leaves by name, in file order, on the memory of a state."""
        whole, parts = dict(zip(self.names, tensors, strict=True)), self._parts
        return {
            name: parts[name].leaf(tensors, arrays)
            if name in parts
            else Leaf.of_tensor(whole[name].detach())
            for name in self.pieces.names[1:]
        }

    def image(
        self, path: str, located: Located, tensors: list[torch.Tensor], arrays: list[Bytes]
    ) -> ScatteredImage:
        """Return the tensor file on the memory of a CPU state."""
        addresses = np.append(located.addresses, 0)[self._tensors] + self._shifts
        apart = {
            at: arrays[array] if array >= 0 else tensor_bytes(tensors[tensor])
            for at, array, tensor in self._apart
        }
        return self._file.image(path, addresses, apart, owners=located.owners)


def _overlap(begins: Numbers, reaches: Numbers) -> bool:
    """Whether some bytes are in two of the ranges."""
    order = np.argsort(begins)
    begins, ends = begins[order], (begins + reaches)[order]
    return bool((begins[1:] < ends[:-1]).any())


def _parts(flat: FlatState) -> dict[str, _Part]:
    """Return the leaves that are not one whole tensor, by name."""
    if not flat.views and not flat.arrays:
        return {}
    whole = flat.tensors.get
    names = [name for name, leaf in flat.leaves.items() if leaf.source is not whole(name)]
    tensors = list(flat.tensors.values())
    array = {name: at for at, name in enumerate(flat.arrays)}
    number = {name: at for at, name in enumerate(flat.tensors)}
    members: dict[str, list[int]] = {}
    for name, view in flat.views.items():
        members.setdefault(view.leaf, []).append(number[name])
    parts: dict[str, _Part] = {}
    for name in names:
        dtype, shape, size, source = flat.leaves[name]
        if not isinstance(source, torch.Tensor):
            parts[name] = _Part(dtype, shape, size, array=array[name])
        else:
            # Two storages can begin at one address: the largest one contains the whole leaf.
            at = max(members[name], key=lambda one: tensors[one].untyped_storage().nbytes())
            shift = source.data_ptr() - tensors[at].data_ptr()
            parts[name] = _Part(dtype, shape, size, tensor=at, shift=shift)
    return parts
