"""The plain values of a state as stock DCP stores them, found in the state's skeleton.

Stock DCP joins the keys of dicts to a name. It stores a value without tensors under one name, as
`torch.save` writes it: a number, a tuple, or a list without tensors and dicts in it. Tuples with
tensors in them are stored like lists, and numpy arrays like tensors.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import torch

from iobench.checkpoint.state_tree import unflatten
from iobench.checkpoint.tree_spec import json_text

__all__ = [
    "StockValue",
    "ValueFiles",
    "name_of",
    "own_skeletons",
    "parsed_skeleton",
    "shared_skeleton",
    "stock_paths",
    "stock_values",
    "tensor_entries",
]

StatePath = tuple[str | int, ...]


def parsed_skeleton(text: str) -> Any:
    """Return the skeleton in `text`, which `json_text` has made."""
    with suppress(UnicodeEncodeError):  # half of a surrogate pair
        return msgspec.json.decode(text)  # in two thirds of the time of `json`
    return json.loads(text)


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


class ValueFiles:
    """Makes the file of `torch.save` for values; an unchanged one is made once."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[Any, bytes]] = {}

    def files(self, values: Sequence[StockValue]) -> dict[str, bytes]:
        """Return the file of each value by its name."""
        made: dict[str, tuple[Any, bytes]] = {}
        for path, encoded, _ in values:
            name = name_of(path)
            last, text = self._last.get(name), json_text(encoded)
            same = last is not None and last[0] == text
            made[name] = last if last and same else (text, _saved(unflatten(encoded, {})))
        self._last = made
        return {name: file for name, (_, file) in made.items()}


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()
