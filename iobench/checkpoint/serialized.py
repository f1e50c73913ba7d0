"""Serialized: a training state as the files of a checkpoint of one process, before any copy.

`SafetensorsFormat` writes them: a safetensors file and JSON.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from iobench.checkpoint.aliases import ALIGNMENT
from iobench.checkpoint.checksums import record_of, recorded
from iobench.checkpoint.content import Content, Contents
from iobench.checkpoint.manifest import Manifest, Pieces
from iobench.checkpoint.place import (
    PartOffer,
    Place,
    SaveJob,
    SaveParticipant,
    Written,
)
from iobench.checkpoint.state_tree import FlatState, Template, flatten
from iobench.checkpoint.store import Staged
from iobench.errors import StateError
from iobench.formats.collector import collector_paused
from iobench.formats.many_parts import Numbers, ScatteredImage
from iobench.formats.safetensors_header import header_bytes
from iobench.formats.tensor_layouts import FileLayout, Located, TensorLayouts, numbers
from iobench.formats.tensors import tensor_bytes, tensor_memory
from iobench.units import GIB
from iobench.writers.image import Bytes, FileImage


def of_one_rank(state: Any) -> Any:
    """Return `state` with plain tensors for DTensors, which in a world of one are whole.

    Raises StateError for one that other ranks hold too.
    """
    if "torch.distributed.tensor" not in sys.modules:  # so no DTensor exists
        return state
    from iobench.checkpoint.ranked.structure import localized

    found: list[Any] = []
    whole = localized(state, found)
    for tensor in found:
        if tensor is not None and tensor.device_mesh.size() > 1:
            raise StateError(
                f"a DTensor of {list(tensor.shape)} is sharded over {tensor.device_mesh.size()} "
                "ranks, but the Checkpointer is alone: construct it in every rank, with world='job'"
            )
    return whole


class _Part(NamedTuple):
    """A leaf of the tensor file that is not one whole tensor: memory that several tensors share.

    It begins `shift` bytes after the tensor with the number `tensor`.
    """

    tensor: int
    shift: int


class Structure(Template):
    """What the files of a checkpoint have in common with those of the next one.

    The states of one training differ in their bytes and plain values only. So the layout of the
    tensor file and the JSON around the plain values are made once. They serve every later state
    that equals the first one in all that they depend on (docs/decisions/0040).

    `size_bytes` is the size of the tensor file, and `pieces` are its parts in file order, "" for
    the header. It keeps no tensor alive, and has no object for each leaf, which the garbage
    collector would look at.
    """

    def __init__(self, flat: FlatState) -> None:
        """Raises StateError for a state that the format cannot hold."""
        described = [(name, leaf.dtype, leaf.shape) for name, leaf in flat.leaves.items()]
        try:
            header, sizes = header_bytes(described)
        except ValueError as error:
            raise StateError(str(error)) from error
        super().__init__(flat)
        self.pieces = Pieces([("", len(header)), *sizes.items()])
        self.size_bytes = sum(self.pieces.sizes)
        parts = _parts(flat)
        self._file = FileLayout(header, list(filter(None, sizes.values())))
        self._find_leaves([name for name, size in sizes.items() if size], parts)
        self._find_views(flat, parts)

    def _find_leaves(self, names: list[str], parts: Mapping[str, _Part]) -> None:
        """Find the memory of the leaves `names`, which are those in the file, in its order."""
        number = dict(zip(self.names, itertools.count()))
        self._tensors = numbers(map(number.__getitem__, names))
        self._reaches = self.layouts.reaches[self._tensors]
        scattered = ~self.layouts.contiguous[self._tensors]
        self._shifts = np.zeros_like(self._tensors)
        self._shared = [at for at, name in enumerate(names) if name in parts]
        for at in self._shared:
            self._tensors[at], self._shifts[at] = parts[names[at]]
            self._reaches[at], scattered[at] = self._file.lengths[at + 1], False
        self._copied = np.flatnonzero(scattered).tolist()

    def _find_views(self, flat: FlatState, parts: Mapping[str, _Part]) -> None:
        """Find the tensors that share memory, and their distances in bytes."""
        number = {name: at for at, name in enumerate(self.names)} if flat.views else {}
        members = [number[name] for name in flat.views]
        bases = [
            parts[view.leaf].tensor if view.leaf in parts else number[view.leaf]
            for view in flat.views.values()
        ]
        tensors = list(flat.tensors.values()) if flat.views else []
        self._members, self._bases = numbers(members), numbers(bases)
        self._distances = numbers(
            tensors[member].data_ptr() - tensors[base].data_ptr()
            for member, base in zip(members, bases, strict=True)
        )

    @property
    def comparable(self) -> bool:
        """Whether `find` and `has_aliases_of` can tell that a state has this structure."""
        # Shared memory on a device is copied through a tensor on a storage that contains all of it.
        return super().comparable and (self.on_cpu or not len(self._shared))

    def has_aliases_of(self, located: Located) -> bool:
        """Whether the tensors share memory like those of the first state, and no other ones do.

        False for overlapping memory of several storages, which torch.from_numpy can make.
        """
        addresses, storages = located.addresses, located.storages
        moved = addresses[self._members] - addresses[self._bases] != self._distances
        parted = storages[self._members] != storages[self._bases]
        starts = addresses[self._tensors] + self._shifts
        odd = ((starts - storages[self._tensors]) % ALIGNMENT)[self._shared]
        if moved.any() or parted.any() or odd.any():
            return False
        return not _overlap(starts, self._reaches)

    def leaf_by_leaf(self, path: str, tensors: Sequence[torch.Tensor]) -> FileImage:
        """Return the tensor file on the memory of a state on any device."""
        leaves = [tensors[number].detach() for number in self._tensors]
        for at in self._shared:
            leaves[at] = _memory_at(leaves[at], int(self._shifts[at]), int(self._reaches[at]))
        return FileImage.of_parts(path, [self._file.text, *map(tensor_memory, leaves)])

    def image(self, path: str, located: Located, tensors: list[torch.Tensor]) -> ScatteredImage:
        """Return the tensor file on the memory of a CPU state."""
        addresses = located.addresses[self._tensors] + self._shifts
        apart = {at: tensor_bytes(tensors[self._tensors[at]]) for at in self._copied}
        return self._file.image(path, addresses, apart, owners=located.owners)


def _memory_at(tensor: torch.Tensor, shift: int, size_bytes: int) -> torch.Tensor:
    """Return bytes of the storage of a tensor, from `shift` after the tensor begins."""
    storage = tensor.untyped_storage()
    begin = tensor.data_ptr() + shift - storage.data_ptr()
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return raw.set_(storage, begin, (size_bytes,), (1,))


def _overlap(begins: Numbers, reaches: Numbers) -> bool:
    """Whether some bytes are in two of the ranges."""
    order = np.argsort(begins)
    begins, ends = begins[order], (begins + reaches)[order]
    return bool((begins[1:] < ends[:-1]).any())


def _parts(flat: FlatState) -> dict[str, _Part]:
    """Return the leaves that are not one whole tensor, by name."""
    if not flat.views:
        return {}
    whole = flat.tensors.get
    names = [name for name, leaf in flat.leaves.items() if leaf.source is not whole(name)]
    tensors = list(flat.tensors.values())
    number = {name: at for at, name in enumerate(flat.tensors)}
    members: dict[str, list[int]] = {}
    for name, view in flat.views.items():
        members.setdefault(view.leaf, []).append(number[name])
    parts: dict[str, _Part] = {}
    for name in names:
        # Two storages can begin at one address: the largest one contains the whole leaf.
        at = max(members[name], key=lambda one: tensors[one].untyped_storage().nbytes())
        parts[name] = _Part(at, flat.leaves[name].source.data_ptr() - tensors[at].data_ptr())
    return parts


FORMAT = "safetensors"
"""Of the files of a checkpoint that one process saved."""

TENSORS = "tensors.safetensors"
"""The file of all tensors and arrays; the safetensors library reads it too."""

SKELETON = "state.json"
"""The file of everything else, see `state_tree`."""


@dataclass(frozen=True, kw_only=True)
class Serialized(Content):
    """Contents of the files `TENSORS` and `SKELETON`. Several tensors may share one leaf."""

    structure: Structure = field(repr=False)

    @classmethod
    def of(cls, state: Any) -> Serialized:
        """Serialize `state`. Raises StateError with the path of what cannot be saved."""
        return Serializer().serialize(state)

    @property
    def size_bytes(self) -> int:
        """Size of the tensor file."""
        return self.structure.size_bytes

    def image(self) -> FileImage:
        if not self.on_cpu:
            return self.structure.leaf_by_leaf(TENSORS, self.tensors)
        return self.structure.image(TENSORS, self.located, self.tensors)

    def image_in(self, memory: Bytes) -> FileImage:
        """Return the tensor file whose snapshot begins at the first byte of `memory`."""
        image = FileImage.of(TENSORS, [memory[: self.size_bytes]])
        return image if self.streamed is None else self.streamed.image(image)

    def skeleton_image(self) -> FileImage:
        return FileImage.of(SKELETON, [np.frombuffer(self.skeleton.encode(), dtype=np.uint8)])


class Serializer(Contents):
    """Serializes one state after the other; a state that is like the last one costs less."""

    def __init__(self) -> None:
        self._last: Structure | None = None

    def serialize(self, state: Any) -> Serialized:
        """Serialize `state`. Raises StateError with the path of what cannot be saved."""
        with collector_paused():
            return self._like_last(state) or self._anew(state)

    def local(self, state: Any) -> Serialized:
        """Return the content of a save of one process, in which DTensors are whole."""
        return self.serialize(of_one_rank(state))

    def _like_last(self, state: Any) -> Serialized | None:
        """Serialize a state of the same structure as the last one; return None for another one."""
        structure = self._last
        if structure is None:
            return None
        found = structure.find(state)
        if found is None or not structure.has_aliases_of(found.located):
            return None
        return Serialized(
            structure=structure,
            skeleton=structure.skeleton(found.texts),
            tensors=found.tensors,
            located=found.located,
        )

    def _anew(self, state: Any) -> Serialized:
        self._last = None  # also if `state` cannot be saved
        flat = flatten(state, compact=True)
        structure = Structure(flat)
        tensors = list(flat.tensors.values())
        located = structure.layouts.locate_same(tensors)
        if located is None:
            raise StateError(f"{_without_storage(flat)}: its storage is smaller than the tensor")
        if structure.comparable and structure.has_aliases_of(located):
            self._last = structure
        return Serialized(
            structure=structure,
            skeleton=structure.skeleton(flat.plain_texts()),
            tensors=tensors,
            located=located,
        )


def _without_storage(flat: FlatState) -> str:
    """Return the name of the first tensor that its storage does not hold."""
    return next(
        name
        for name, tensor in flat.tensors.items()
        if TensorLayouts([tensor]).locate([tensor]) is None
    )


_MANY, _SMALL = 5000, 2 * GIB
"""Pieces and bytes of a save without runs of the garbage collector: each would look at them all."""


@dataclass(frozen=True, kw_only=True)
class SafetensorsFormat:
    """Writes the tensors of one process as one file, and the rest of the state as JSON."""

    participant: SaveParticipant

    def write(self, job: SaveJob, offer: PartOffer | None) -> Written:
        del offer  # there is no other node
        save, content, memory, target = job
        image = content.image() if memory is None else content.image_in(memory)
        small, pieces = [content.skeleton_image()], content.structure.pieces
        if self.participant.exports:
            small += self.participant.durable(save)[1]
        brief = memory is None and not target.rate_bytes_per_s and content.size_bytes < _SMALL
        with (
            collector_paused() if brief and len(pieces) >= _MANY else nullcontext(),
            recorded(image, pieces, by_block=target.by_block) as (sent, digests),
        ):
            transfer = target.writer.write_many(
                [target.limited(sent), *small], target.directory, sync_directory=False
            )
        others = tuple(record_of(one, [("", one.size_bytes)]) for one in small)
        return Written(
            transfer=transfer,
            file=image,
            digests=digests,
            others=others,
        )

    def publish(
        self,
        job: SaveJob,
        own: Written,
        staged: Staged,
        votes: Sequence[str],
        made: Callable[..., Manifest],
        place: Place,
    ) -> Manifest:
        del votes, place
        assert own.digests is not None
        held, _ = self.participant.durable(job.save)  # before a manifest names it
        with collector_paused():
            manifest = made(format=FORMAT, files=(own.digests.record(), *own.others), offload=held)
            pieces = job.content.structure.pieces.json(own.digests.found)
            text = manifest.json_parts({own.file.path: pieces})
        staged.publish(text)
        return manifest

    def discard(self, directory: Path) -> None:
        raise AssertionError(directory)  # one process removes what it has staged
