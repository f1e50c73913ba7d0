"""Leaf: a tensor to save. View: one that lies in another's memory, as tied weights do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from iobench.formats.safetensors_header import DTYPES
from iobench.formats.tensors import dtype_name, tensor_bytes, torch_dtype
from iobench.writers.image import Bytes

__all__ = ["Leaf", "View", "share"]

_ALIGNMENT = 16  # of any torch dtype's elements
_NAMES = {getattr(torch, name): name for name in DTYPES if hasattr(torch, name)}


class Leaf(NamedTuple):
    """A tensor of the file: `dtype` is its torch name, `source` a tensor or a numpy array's bytes.

    `size_bytes` is what it takes in the file. A tuple, as trainers wait while thousands are made.
    """

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    source: torch.Tensor | Bytes

    def __repr__(self) -> str:
        """Without the values, as tracebacks and logs show it."""
        return f"Leaf({self.dtype} {list(self.shape)}, {self.size_bytes} bytes)"

    @classmethod
    def of_tensor(cls, tensor: torch.Tensor) -> Leaf:
        """As the file shows it: by its dtype and shape, or as bytes where the file lacks those."""
        dtype, size = _NAMES.get(tensor.dtype), tensor.nbytes
        if dtype is None:
            return cls(dtype="uint8", shape=(size,), size_bytes=size, source=tensor)
        return cls(dtype=dtype, shape=tuple(tensor.shape), size_bytes=size, source=tensor)

    @classmethod
    def of_bytes(cls, data: Bytes, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Leaf:
        """A numpy array with these bytes."""
        if dtype.isnative and dtype.name in DTYPES:
            return cls(dtype=dtype.name, shape=shape, size_bytes=len(data), source=data)
        return cls(dtype="uint8", shape=(len(data),), size_bytes=len(data), source=data)

    @property
    def on_cpu(self) -> bool:
        return not isinstance(self.source, torch.Tensor) or self.source.is_cpu

    def cpu_bytes(self) -> Bytes:
        """Its bytes as they lie; a copy only of a tensor that is not contiguous."""
        if isinstance(self.source, torch.Tensor):
            return tensor_bytes(self.source)
        return self.source


@dataclass(frozen=True, kw_only=True)
class View:
    """Where a tensor lies in the leaf `leaf`; `layout` is empty where it is just that leaf."""

    leaf: str
    layout: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> View:
        keys = ("dtype", "shape", "stride", "offset")
        return cls(leaf=entry["$tensor"], layout={key: entry[key] for key in keys})

    def of(self, leaf: torch.Tensor) -> torch.Tensor:
        """The tensor, on the memory of `leaf`."""
        dtype = torch_dtype(self.layout["dtype"])
        offset, odd = divmod(self.layout["offset"], dtype.itemsize)
        shape, stride = self.layout["shape"], self.layout["stride"]
        if 0 in shape:  # of its strides and offset nothing is left to say
            return torch.empty(shape, dtype=dtype)
        reach = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
        if odd or (offset + reach) * dtype.itemsize > leaf.numel() * leaf.element_size():
            raise ValueError(f"a view at {self.layout['offset']} does not lie in {self.leaf}")
        empty = torch.empty(0, dtype=dtype)
        return empty.set_(leaf.untyped_storage(), offset, shape, stride)


class _Span(NamedTuple):
    """The bytes [begin, end) of a device's memory that a tensor spans."""

    name: str
    tensor: torch.Tensor
    begin: int
    end: int

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> _Span:
        begin = tensor.data_ptr()
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        return cls(
            name=name,
            tensor=tensor,
            begin=begin,
            end=begin + reach * tensor.element_size(),
        )


def share(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, Leaf], dict[str, View]]:
    """(leaves by name, for each tensor that is not a leaf by itself its view).

    Tensors of one storage whose memory overlaps share one leaf; the others have their own,
    contiguous, whatever else is in their storage.
    """
    leaves: dict[str, Leaf] = {}
    views: dict[str, View] = {}
    for names in _by_storage(tensors).values():
        if len(names) > 1:
            for group in _overlapping([_Span.of(name, tensors[name]) for name in names]):
                if len(group) > 1:
                    _share_one(group, leaves, views)
    for name, tensor in tensors.items():
        if name in views:
            continue
        leaves[name] = Leaf.of_tensor(tensor)
        if tensor.dtype not in _NAMES:
            views[name] = View(leaf=name, layout=_layout(_contiguous(tensor), 0))
    return leaves, views


def _by_storage(tensors: Mapping[str, torch.Tensor]) -> dict[tuple[torch.device, int], list[str]]:
    """Names by device and where on it the tensor's storage begins; empty tensors are in none."""
    found: dict[tuple[torch.device, int], list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            place = tensor.device, tensor.untyped_storage().data_ptr()
            found.setdefault(place, []).append(name)
    return found


def _overlapping(spans: list[_Span]) -> list[list[_Span]]:
    """Spans of one storage in groups that overlap."""
    groups: list[list[_Span]] = []
    end = 0
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        if not groups or span.begin >= end:
            groups.append([])
        groups[-1].append(span)
        end = max(end, span.end)
    return groups


def _share_one(group: list[_Span], leaves: dict[str, Leaf], views: dict[str, View]) -> None:
    begin, end = group[0].begin, max(span.end for span in group)
    base = next(
        (s for s in group if (s.begin, s.end) == (begin, end) and s.tensor.is_contiguous()), None
    )
    odd = any((span.begin - begin) % span.tensor.element_size() for span in group)
    if base is None or odd or dtype_name(base.tensor.dtype) not in DTYPES:
        # several begin at one place where numpy's memory was taken twice; the largest holds all
        storages = [span.tensor.untyped_storage() for span in group]
        storage = max(storages, key=lambda one: one.nbytes())
        begin -= (begin - storage.data_ptr()) % _ALIGNMENT
        raw = torch.empty(0, dtype=torch.uint8, device=storage.device)
        whole = raw.set_(storage, begin - storage.data_ptr(), (end - begin,), (1,))
        base = _Span.of(group[0].name, whole)
    leaves[base.name] = Leaf.of_tensor(base.tensor)
    for span in group:
        same = (
            span.begin == base.begin
            and span.tensor.dtype == base.tensor.dtype
            and span.tensor.shape == base.tensor.shape
            and span.tensor.is_contiguous()
        )
        layout = {} if same else _layout(span.tensor, span.begin - base.begin)
        views[span.name] = View(leaf=base.name, layout=layout)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """One without memory that has its shape and lies one element after the other."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _layout(tensor: torch.Tensor, offset: int) -> dict[str, Any]:
    return {
        "dtype": dtype_name(tensor.dtype),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "offset": offset,
    }
