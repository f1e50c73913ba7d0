"""Tied tensors: one of them is saved, and the others are on its memory again after a load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from iobench.formats.many_parts import Numbers
from iobench.formats.tensor_layouts import Located, TensorLayout, TensorLayouts, numbers
from iobench.formats.tensors import torch_dtype


class TiesAlike:
    """Which tensors begin at one address, compared with those of a later state."""

    def __init__(self, layouts: TensorLayouts, located: Located) -> None:
        self._filled = np.flatnonzero(layouts.reaches)
        addresses, first = located.addresses[self._filled], dict[int, int]()
        # For each tensor with elements, the first one at its address.
        self._first = numbers(first.setdefault(a, at) for at, a in enumerate(addresses.tolist()))
        self._changes = _changes(addresses)

    def alike(self, located: Located) -> bool:
        """Whether the same tensors, and no others, begin at one address."""
        addresses = located.addresses[self._filled]
        same = addresses == addresses[self._first]
        return bool(same.all()) and _changes(addresses) == self._changes


def _changes(addresses: Numbers) -> int:
    """Return the number of different addresses, less one; np.unique takes 60 times as long."""
    return int(np.count_nonzero(np.diff(np.sort(addresses))))


def view_entry(layout: TensorLayout, stored: TensorLayout) -> dict[str, Any]:
    """Return what the skeleton has of a tensor whose bytes are those of a stored one."""
    in_place = stored.contiguous
    stride = layout.stride if in_place else torch.empty(layout.shape, device="meta").stride()
    where = {"shape": list(layout.shape), "stride": list(stride), "offset": 0}
    return {"dtype": layout.dtype_name, **where}


def ties_of(
    layouts: Mapping[str, TensorLayout], located: Located, sharded: Sequence[Any] | None
) -> dict[str, str]:
    """Return the names of tied tensors, and the name of the one that is saved for each.

    They have the same bytes and sharding, and in a file of DCP the same layout. Otherwise a
    contiguous one is saved, of the largest elements, so that the address of each fits its dtype.
    Empty ones, like shards of tied DTensors, have the same storage.
    """
    addresses = located.addresses.tolist()
    if len(set(addresses)) == len(addresses):
        return {}
    wholes = sharded or [None] * len(layouts)
    rows = zip(layouts, addresses, layouts.values(), wholes, located.owners, strict=False)
    ties: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, address, layout, whole, owner in sorted(rows, key=_saved_first):
        any_layout = layout.size_bytes and sharded is None
        extent = (layout.device, layout.reach_bytes) if any_layout else layout
        begin = address if layout.size_bytes else owner._cdata
        spec = None if whole is None else whole._spec
        leaf = first.setdefault((begin, extent, spec), name)
        if leaf != name and (layouts[leaf].contiguous or layout == layouts[leaf]):
            ties[name] = leaf
    return ties


def _saved_first(row: tuple[str, int, TensorLayout, Any, Any]) -> tuple[bool, int]:
    layout = row[2]
    return not layout.contiguous, -layout.dtype.itemsize


def view_on(leaf: torch.Tensor, entry: Mapping[str, Any]) -> torch.Tensor:
    """Return the tensor of an entry, on the memory of `leaf`. Raises ValueError if outside."""
    dtype, shape, stride = torch_dtype(entry["dtype"]), entry["shape"], entry["stride"]
    offset, odd = divmod(entry["offset"], dtype.itemsize)
    if 0 in shape:  # strides and offset mean nothing without elements
        return torch.empty(shape, dtype=dtype)
    reach = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
    if odd or (offset + reach) * dtype.itemsize > leaf.numel() * leaf.element_size():
        raise ValueError(f"a view at {entry['offset']} is outside {entry['$tensor']}")
    return torch.empty(0, dtype=dtype).set_(leaf.untyped_storage(), offset, shape, stride)
