"""Serialized: a training state as the files of a checkpoint of one process, before any copy.

`SafetensorsFormat` writes them: a safetensors file and JSON.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

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
from iobench.formats.many_parts import ScatteredImage
from iobench.formats.safetensors_header import DTYPES, header_bytes
from iobench.formats.tensor_layouts import FileLayout, Located, numbers
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
        described = [
            (name, layout.dtype_name, layout.shape)
            if layout.dtype_name in DTYPES
            else (name, "uint8", (layout.size_bytes,))
            for name, layout in zip(flat.tensors, flat.layouts.each, strict=True)
            if name not in flat.ties
        ]
        try:
            header, sizes = header_bytes(described)
        except ValueError as error:
            raise StateError(str(error)) from error
        super().__init__(flat)
        self.pieces = Pieces([("", len(header)), *sizes.items()])
        self.size_bytes = sum(self.pieces.sizes)
        self._file = FileLayout(header, list(filter(None, sizes.values())))
        number = dict(zip(self.names, itertools.count()))
        self._tensors = numbers(number[name] for name, size in sizes.items() if size)
        self._copied = np.flatnonzero(~self.layouts.contiguous[self._tensors]).tolist()

    def leaf_by_leaf(self, path: str, tensors: Sequence[torch.Tensor]) -> FileImage:
        """Return the tensor file on the memory of a state on any device."""
        leaves = [tensor_memory(tensors[number].detach()) for number in self._tensors]
        return FileImage.of_parts(path, [self._file.text, *leaves])

    def image(self, path: str, located: Located, tensors: list[torch.Tensor]) -> ScatteredImage:
        """Return the tensor file on the memory of a CPU state."""
        addresses = located.addresses[self._tensors]
        apart = {at: tensor_bytes(tensors[self._tensors[at]]) for at in self._copied}
        return self._file.image(path, addresses, apart, owners=located.owners)


FORMAT = "safetensors"
"""Of the files of a checkpoint that one process saved."""

TENSORS = "tensors.safetensors"
"""The file of all tensors and arrays; the safetensors library reads it too."""

SKELETON = "state.json"
"""The file of everything else, see `state_tree`."""


@dataclass(frozen=True, kw_only=True)
class Serialized(Content):
    """Contents of the files `TENSORS` and `SKELETON`."""

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
        if found is None:
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
        if structure.comparable:
            self._last = structure
        return Serialized(
            structure=structure,
            skeleton=structure.skeleton(flat.plain_texts()),
            tensors=list(flat.tensors.values()),
            located=flat.located,
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
