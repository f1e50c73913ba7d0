"""What a rank has of a state, and what its state has in common with the next one.

The plain values of a state, as stock DCP stores them, are found in the state's skeleton: DCP joins
the keys of dicts to a name, and stores a value without tensors under one name, as `torch.save`
writes it: a number, a tuple, or a list without tensors and dicts in it. Tuples with tensors in them
are stored like lists, and numpy arrays like tensors.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import xxhash
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from iobench.checkpoint.rebuild import PerRank, unflatten
from iobench.checkpoint.state_tree import FlatState, KnownState, Template, flatten, json_text
from iobench.errors import StateError
from iobench.formats.tensor_layouts import Located

StatePath = tuple[str | int, ...]


class StockValue(NamedTuple):
    """A plain value at `path` of the state, as JSON. `own`: it is inside of a PerRank."""

    path: StatePath
    encoded: Any
    own: bool


def name_of(path: StatePath) -> str:
    """Return stock DCP's name of what is at `path`."""
    return ".".join(map(str, path))


def stock_values(skeleton: Any, rank: int) -> list[StockValue]:
    """Return the plain values in the skeleton of one rank."""
    found = _visit(skeleton, (), [rank], False, tensors=False)
    return [one for one in found if isinstance(one, StockValue)]


def stock_paths(skeleton: Any, ranks: Sequence[int]) -> list[tuple[StatePath, str]]:
    """Return the path and the name of all tensors and arrays in the skeleton of `ranks`."""
    return [
        (path, entry["$tensor"] if "$tensor" in entry else entry["$array"])
        for path, entry in tensor_entries(skeleton, ranks)
    ]


def tensor_entries(skeleton: Any, ranks: Sequence[int]) -> list[tuple[StatePath, dict[str, Any]]]:
    """Like `stock_paths`, with the entry of the skeleton: it describes a view."""
    return [one for one in _visit(skeleton, (), ranks, False) if not isinstance(one, StockValue)]


def own_skeletons(skeleton: dict[str, Any] | list[Any]) -> Iterator[list[Any]]:
    """Yield the list of the ranks' values of each PerRank, in the order of the state."""
    if isinstance(skeleton, dict) and "$per_rank" in skeleton:
        yield skeleton["$per_rank"]
        return
    for item in skeleton.values() if isinstance(skeleton, dict) else skeleton:
        if isinstance(item, dict | list) and not _only_tensors(item):
            yield from own_skeletons(item)


_Tensor = tuple[StatePath, dict[str, Any]]


def _visit(
    value: Any, path: StatePath, ranks: Sequence[int], own: bool, *, tensors: bool = True
) -> Iterator[StockValue | _Tensor]:
    """Yield what is in the skeleton `value`.

    Without `tensors` most of those are skipped: the values are asked for in each save, and a state
    has few of them among thousands of tensors.
    """
    if isinstance(value, dict):
        tag = next(iter(value), "")
        if tag in ("$tensor", "$array"):
            yield path, value
            return
        if tag == "$per_rank":
            for rank, item in zip(ranks, value[tag], strict=True):
                yield from _visit(item, (*path, f"rank{rank}"), ranks, True, tensors=tensors)
            return
        if tag in ("$dict", "$ordered"):
            items = value[tag]  # a dict if it was one of many tensors
            for key, item in items.items() if isinstance(items, dict) else items:
                if tensors or not _only_tensors(item):
                    name = str(unflatten(key, {}))
                    yield from _visit(item, (*path, name), ranks, own, tensors=tensors)
            return
        if not tag.startswith("$"):
            for key, item in value.items():
                if tensors or not _only_tensors(item):
                    yield from _visit(item, (*path, key), ranks, own, tensors=tensors)
            return
    if _has_parts(value):
        for number, item in enumerate(value if isinstance(value, list) else value["$tuple"]):
            yield from _visit(item, (*path, number), ranks, own, tensors=tensors)
        return
    yield StockValue(path, value, own)


def _only_tensors(item: Any) -> bool:
    """Whether an item is a tensor, or a dict of tensors."""
    if type(item) is not dict:
        return False
    return "$tensor" in item or all(type(v) is dict and "$tensor" in v for v in item.values())


def _has_parts(value: Any) -> bool:
    """Whether a value is a list or tuple whose items have names of their own."""
    if isinstance(value, list):
        return any(_is_container(item) or _has_parts(item) for item in value)
    if isinstance(value, dict) and "$tuple" in value:
        return any(_has_tensors(item) for item in value["$tuple"])
    return False


def _is_container(value: Any) -> bool:
    """Whether an item of a list is a tensor, an array or a dict."""
    if not isinstance(value, dict):
        return False
    tag = next(iter(value), "")
    return not tag.startswith("$") or tag in ("$tensor", "$array", "$dict", "$ordered", "$per_rank")


def _has_tensors(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_has_tensors, value))
    if isinstance(value, dict):
        return not {"$tensor", "$array"}.isdisjoint(value) or any(map(_has_tensors, value.values()))
    return False


def shared_skeleton(skeleton: Any) -> Any:
    """Return a skeleton without the values of each PerRank."""
    if isinstance(skeleton, list):
        return [shared_skeleton(item) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    if "$per_rank" in skeleton:
        return {"$per_rank": []}
    return {key: shared_skeleton(item) for key, item in skeleton.items()}


def value_file(value: StockValue) -> bytes:
    """Return the file of `torch.save` for a value."""
    stream = io.BytesIO()
    torch.save(unflatten(value.encoded, {}), stream)
    return stream.getvalue()


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


def local_box(sharded: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes and offsets of the part of a DTensor that this rank holds."""
    mesh = sharded.device_mesh
    if mesh.get_coordinate() is None:  # nothing
        return (0,) * sharded.ndim, (0,) * sharded.ndim
    sizes, offsets = compute_local_shape_and_global_offset(sharded.shape, mesh, sharded.placements)
    return tuple(sizes), tuple(offsets)


def is_sharded(value: Any) -> bool:
    """Whether a value is a DTensor. Without one, its module is not imported."""
    return isinstance(value, torch.Tensor) and hasattr(value, "placements")


def empty_local(sharded: Any) -> torch.Tensor:
    """Return new memory for this rank's part of a DTensor, on its device."""
    device = sharded._local_tensor.device
    if device.type == "meta":
        kind = sharded.device_mesh.device_type
        device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else kind
    return torch.empty(local_box(sharded)[0], dtype=sharded.dtype, device=device)


def sharded_like(sharded: Any, local: torch.Tensor) -> Any:
    """Return a DTensor with the sharding of `sharded` on the memory `local`. No collective."""
    whole = torch.empty(sharded.shape, dtype=sharded.dtype, device="meta")
    return DTensor.from_local(
        local,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


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
        expected, offsets = local_box(whole)
        if whole.device_mesh.get_coordinate() is None:
            sizes = expected
        elif expected != sizes and whole.numel():
            raise StateError(
                f"{name}: its local tensor has the shape {list(sizes)}, its placements "
                f"{whole.placements} give {list(expected)}"
            )
        return cls(local.dtype, tuple(whole.shape), offsets, sizes)


class RankStructure(Template):
    """`held` are the parts of the tensors by name, `tied` the names of tensors that are others.

    `key` is a hash of all that a plan depends on. It keeps no tensor alive.
    """

    def __init__(self, flat: FlatState, sharded: Sequence[DTensor | None]) -> None:
        super().__init__(flat)
        tensors = list(flat.tensors.values())
        wholes = [*sharded, *([None] * flat.array_count)]
        self.held = {
            name: Held.of(name, tensor, whole)
            for name, tensor, whole in zip(self.names, tensors, wholes, strict=True)
        }
        self.tied = flat.ties
        self.strides = {
            name: tensor.stride() for name, tensor in zip(self.names, tensors, strict=True)
        }
        self.digest = _hash(json_text(shared_skeleton(flat.skeleton)))
        """Of what must be the same on all ranks: the first skeleton, without PerRank."""
        self._specs = [None if whole is None else whole._spec for whole in sharded]
        self._shared = sorted(set(range(len(flat.plain))) - flat.per_rank)
        # DCP plans a DTensor differently, even if each rank has all of it.
        kinds = [whole is not None for whole in wholes]
        rows = [
            (name, kind, *held, self.strides[name])
            for (name, held), kind in zip(self.held.items(), kinds, strict=True)
        ]
        self.key = _hash(repr((rows, self.tied, self.digest if not flat.spec else self.texts)))

    def find_sharded(self, state: Any, sharded: Sequence[DTensor | None]) -> KnownState | None:
        """Like `find`, for a localized state. Also None if the shardings are others."""
        if len(sharded) != len(self._specs):
            return None
        for whole, spec in zip(sharded, self._specs, strict=True):
            found_spec = None if whole is None else whole._spec
            if found_spec is not spec and found_spec != spec:
                return None
        return self.find(state)

    def plain_digest(self, texts: Mapping[int, str]) -> str:
        """Return a hash of what must be the same on all ranks, with these plain values."""
        return _hash("\0".join([self.digest, *(texts[number] for number in self._shared)]))


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


def local_state(state: Any, rank: int, last: RankStructure | None) -> LocalState:
    """Return the state of this rank; faster if it has the structure `last`.

    Raises StateError with the path of what cannot be saved.
    """
    wholes: list[DTensor | None] = []
    tree = localized(state, wholes)
    if last and (found := last.find_sharded(tree, wholes)):
        skeleton, digest = last.skeleton(found.texts), last.plain_digest(found.texts)
        return LocalState(last, skeleton, digest, found.tensors, wholes, found.located)
    flat = flatten(tree, rank=rank, sharded=wholes)
    if len(flat.tensors) - flat.array_count != len(wholes):
        raise StateError("the attributes of an OrderedDict hold tensors; move them into the state")
    structure = RankStructure(flat, wholes)
    tensors = list(flat.tensors.values())
    texts = flat.plain_texts()
    skeleton = structure.skeleton(texts)
    digest = structure.plain_digest(texts)
    return LocalState(structure, skeleton, digest, tensors, wholes, flat.located)


def _hash(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())
