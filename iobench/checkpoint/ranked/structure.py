"""RankStructure: what the saves of one rank have in common, apart from the values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from iobench.checkpoint.aliases import Leaf, View
from iobench.checkpoint.per_rank import PerRank
from iobench.checkpoint.ranked.stock_values import shared_skeleton
from iobench.checkpoint.state_tree import FlatState, Share, flatten, plain_text
from iobench.checkpoint.tree_spec import Collected, json_text
from iobench.errors import StateError
from iobench.formats.many_parts import Numbers
from iobench.formats.tensor_layouts import Located, TensorLayouts, numbers
from iobench.formats.tensors import tensor_from_bytes, torch_dtype
from iobench.writers.image import Bytes

__all__ = ["Held", "LocalState", "RankStructure", "local_state", "localized", "tied"]


def localized(state: Any, found: list[DTensor | None]) -> Any:
    """Return `state` with each DTensor replaced by its local tensor; without one, `state` itself.

    `found` gets, for each tensor in the order of the state, its DTensor, or None for a plain one.
    Nothing is copied except containers with DTensors in them, and no collective is called.
    """
    try:
        return _localized(state, found)
    except RecursionError as error:
        raise StateError("the state contains itself, or is nested too deep") from error


def _localized(value: Any, found: list[DTensor | None]) -> Any:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        if isinstance(value, DTensor):
            found.append(value)
            return _local(value)
        found.append(None)
        return value
    if kind is dict or kind is OrderedDict:
        items = {key: _localized(item, found) for key, item in value.items()}
        if all(items[key] is item for key, item in value.items()):
            return value
        if kind is dict:
            return items
        made = OrderedDict(items)
        vars(made).update(vars(value))
        return made
    if kind is list or kind is tuple:
        parts = [_localized(item, found) for item in value]
        same = all(one is other for one, other in zip(parts, value, strict=True))
        return value if same else kind(parts)
    if kind is PerRank:
        inner = _localized(value.value, found)
        return value if inner is value.value else PerRank(inner)
    return value


def _local(tensor: DTensor) -> torch.Tensor:
    local = tensor._local_tensor
    if type(local) is torch.Tensor:
        return local.detach()
    # The result of a collective that still runs, for example: to_local waits for it.
    detached: Any = tensor.detach()
    waited: torch.Tensor = detached.to_local()
    return waited


def tied(sharded: list[DTensor | None]) -> Share:
    """Return the function that finds tied tensors: the same memory, shape and sharding.

    Tensors whose memory only overlaps are saved separately, like in stock DCP.
    """

    def share(
        tensors: Mapping[str, torch.Tensor], layouts: TensorLayouts
    ) -> tuple[dict[str, Leaf], dict[str, View]]:
        first: dict[Any, str] = {}
        views: dict[str, View] = {}
        for (name, tensor), layout, whole in zip(
            tensors.items(), layouts.each, sharded, strict=True
        ):
            key = (
                tensor.untyped_storage()._cdata,
                tensor.storage_offset(),
                layout,
                None if whole is None else whole._spec,
            )
            leaf = first.setdefault(key, name)
            if leaf != name:
                views[name] = View(leaf=leaf)
        return {}, views

    return share


class Held(NamedTuple):
    """The part of a tensor that this rank holds: the box of `sizes` at `offsets` of `shape`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, name: str, local: torch.Tensor, whole: DTensor | None) -> Held:
        """Raises StateError for a DTensor that has no such box."""
        sizes = tuple(local.shape)
        if whole is None:
            return cls(local.dtype, sizes, (0,) * len(sizes), sizes)
        if any(placement.is_partial() for placement in whole.placements):
            raise StateError(
                f"{name} is a DTensor with the placements {whole.placements}: its values are not "
                "reduced yet; redistribute it first"
            )
        shape = tuple(whole.shape)
        if whole.device_mesh.get_coordinate() is None:  # this rank holds nothing of it
            return cls(local.dtype, shape, (0,) * len(shape), (0,) * len(shape))
        expected, offsets = compute_local_shape_and_global_offset(
            whole.shape, whole.device_mesh, whole.placements
        )
        if tuple(expected) != sizes and whole.numel():
            raise StateError(
                f"{name}: its local tensor has the shape {list(sizes)}, its placements "
                f"{whole.placements} give {list(expected)}"
            )
        return cls(local.dtype, shape, tuple(offsets), sizes)


class RankStructure:
    """`names` are those of the tensors and arrays in the order of the state.

    `held` are their parts, `tied` the names of tensors that are others. `key` is a hash of all
    that a plan depends on. It keeps no tensor alive.
    """

    def __init__(self, flat: FlatState, sharded: Sequence[DTensor | None]) -> None:
        tensors = [*flat.tensors.values(), *_arrays(flat)]
        self.names = [*flat.tensors, *flat.arrays]
        self.tensor_count = len(flat.tensors)
        wholes = [*sharded, *([None] * len(flat.arrays))]
        self.held = {
            name: Held.of(name, tensor, whole)
            for name, tensor, whole in zip(self.names, tensors, wholes, strict=True)
        }
        self.tied = {name: view.leaf for name, view in flat.views.items()}
        self.strides = {
            name: tensor.stride() for name, tensor in zip(self.names, tensors, strict=True)
        }
        self.layouts = TensorLayouts(tensors) if flat.arrays else flat.layouts
        self.on_cpu = self.layouts.on_cpu
        self.has_per_rank = bool(flat.per_rank) or '"$per_rank"' in json_text(flat.skeleton)
        self.digest = _hash(json_text(shared_skeleton(flat.skeleton)))
        """Of what must be the same on all ranks: the skeleton without PerRank."""
        self._array_types = [(torch_dtype(one.dtype), one.shape) for one in flat.arrays.values()]
        self._spec = flat.spec
        self._specs = [None if whole is None else whole._spec for whole in sharded]
        self._texts, self._order = flat.template() if flat.spec else ([], [])
        self._shared = sorted(set(range(len(flat.plain))) - flat.per_rank)
        number = {name: at for at, name in enumerate(self.names)}
        self._ties = (
            numbers(number[name] for name in self.tied),
            numbers(number[leaf] for leaf in self.tied.values()),
        )
        self._filled = np.flatnonzero([tensor.numel() for tensor in tensors])
        self._distinct = len({tensor.data_ptr() for tensor in tensors if tensor.numel()})
        # DCP plans a DTensor differently, even if each rank has all of it.
        kinds = [whole is not None for whole in wholes]
        rows = [
            (name, kind, *held, self.strides[name])
            for (name, held), kind in zip(self.held.items(), kinds, strict=True)
        ]
        self.key = _hash(repr((rows, self.tied, self.digest if not flat.spec else self._texts)))

    def collect(self, state: Any, sharded: Sequence[DTensor | None]) -> Collected | None:
        """Return the parts of a localized state; None if its structure is another one."""
        found = Collected(encode=plain_text)
        if self._spec is None or not self._spec.match(state, found):
            return None
        if len(sharded) != len(self._specs):
            return None
        for whole, spec in zip(sharded, self._specs, strict=True):
            found_spec = None if whole is None else whole._spec
            if found_spec is not spec and found_spec != spec:
                return None
        return found

    def still_tied(self, addresses: Numbers) -> bool:
        """Whether the tensors are tied like those of the first state."""
        tied, leaves = self._ties
        if (addresses[tied] != addresses[leaves]).any():
            return False
        return len(np.unique(addresses[self._filled])) == self._distinct

    def skeleton(self, texts: Mapping[int, str]) -> str:
        """Return the JSON of the skeleton with `texts` as the plain values, by number."""
        parts = [""] * (2 * len(self._order) + 1)
        parts[::2] = self._texts
        parts[1::2] = [texts[number] for number in self._order]
        return "".join(parts)

    def plain_digest(self, texts: Mapping[int, str]) -> str:
        """Return a hash of the plain values that must be the same on all ranks."""
        return _hash("\0".join(texts[number] for number in self._shared))

    def array_tensors(self, arrays: Sequence[Bytes]) -> list[torch.Tensor]:
        """Return the numpy arrays as tensors on their memory."""
        return [_tensor(data, *kind) for data, kind in zip(arrays, self._array_types, strict=True)]


class LocalState(NamedTuple):
    """The state of this rank before a save; nothing is copied.

    `tensors` are the local tensors and the arrays, by number, `wholes` the DTensors among them.
    """

    structure: RankStructure
    skeleton: str
    plain_digest: str
    tensors: list[torch.Tensor]
    wholes: list[DTensor | None]
    located: Located

    def told(self) -> dict[str, str]:
        """Return what the other ranks must know about it."""
        return {
            "key": self.structure.key,
            "digest": self.structure.digest,
            "plain": self.plain_digest,
        }


def local_state(state: Any, rank: int, last: RankStructure | None) -> LocalState:
    """Return the state of this rank; faster if it has the structure `last`.

    Raises StateError with the path of what cannot be saved.
    """
    wholes: list[DTensor | None] = []
    tree = localized(state, wholes)
    found = None
    try:
        found = last.collect(tree, wholes) if last else None
    except StateError:  # raised again by `flatten`
        found = None
    if last and found:
        tensors = [*found.tensors, *last.array_tensors(found.arrays)]
        located = last.layouts.locate(tensors)
        if located is not None and last.still_tied(located.addresses):
            skeleton, digest = last.skeleton(found.texts), last.plain_digest(found.texts)
            return LocalState(last, skeleton, digest, tensors, wholes, located)
    flat = flatten(tree, rank=rank, share=tied(wholes))
    if len(flat.tensors) != len(wholes):
        raise StateError("the attributes of an OrderedDict hold tensors; move them into the state")
    structure = RankStructure(flat, wholes)
    tensors = [*flat.tensors.values(), *_arrays(flat)]
    located = structure.layouts.locate(tensors)
    if located is None:
        raise StateError("the storage of a tensor is smaller than the tensor")
    texts = dict(enumerate(flat.plain_texts()))
    skeleton = structure.skeleton(texts) if flat.spec else json_text(flat.skeleton)
    digest = structure.plain_digest(texts) if flat.spec else structure.digest
    return LocalState(structure, skeleton, digest, tensors, wholes, located)


def _arrays(flat: FlatState) -> list[torch.Tensor]:
    return [
        _tensor(leaf.cpu_bytes(), torch_dtype(leaf.dtype), leaf.shape)
        for leaf in flat.arrays.values()
    ]


def _tensor(data: Bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    # torch has no read-only tensors and warns of read-only memory.
    return tensor_from_bytes(data if data.flags.writeable else data.copy(), dtype, shape)


def _hash(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())
