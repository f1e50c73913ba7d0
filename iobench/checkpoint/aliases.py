"""Leaf: a tensor of the tensor file. View: a tensor in the memory of a leaf, like a tied weight."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from iobench.formats.safetensors_header import DTYPES
from iobench.formats.tensor_layouts import TensorLayout
from iobench.formats.tensors import dtype_name, torch_dtype

ALIGNMENT = 16
"""Bytes of the widest element of a torch dtype, complex128."""
_new = tuple.__new__
_NAMES = {getattr(torch, name): name for name in DTYPES if hasattr(torch, name)}


class Leaf(NamedTuple):
    """A tensor of the file: `dtype` is its torch name, `source` has its memory.

    `size_bytes` is its size in the file. A NamedTuple, because it is cheap to make: the trainer
    waits while thousands of leaves are made.
    """

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    source: torch.Tensor

    def __repr__(self) -> str:
        """Leave out the values: tracebacks and logs show the repr."""
        return f"Leaf({self.dtype} {list(self.shape)}, {self.size_bytes} bytes)"

    @classmethod
    def of_tensor(cls, tensor: torch.Tensor) -> Leaf:
        """Return the leaf of a tensor. A dtype that safetensors lacks is stored as bytes."""
        dtype, size = _NAMES.get(tensor.dtype), tensor.nbytes
        if dtype is None:
            return cls("uint8", (size,), size, tensor)
        return cls(dtype, tensor.shape, size, tensor)


@dataclass(frozen=True, kw_only=True)
class View:
    """Position of a tensor in the leaf `leaf`. An empty `layout` means the whole leaf."""

    leaf: str
    layout: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> View:
        keys = ("dtype", "shape", "stride", "offset")
        return cls(leaf=entry["$tensor"], layout={key: entry[key] for key in keys})

    def of(self, leaf: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the memory of `leaf`. Raises ValueError when it does not fit."""
        dtype = torch_dtype(self.layout["dtype"])
        offset, odd = divmod(self.layout["offset"], dtype.itemsize)
        shape, stride = self.layout["shape"], self.layout["stride"]
        if 0 in shape:  # strides and offset mean nothing without elements
            return torch.empty(shape, dtype=dtype)
        reach = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
        if odd or (offset + reach) * dtype.itemsize > leaf.numel() * leaf.element_size():
            raise ValueError(f"a view at {self.layout['offset']} is outside {self.leaf}")
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


def share(
    tensors: Mapping[str, torch.Tensor], layouts: Sequence[TensorLayout]
) -> tuple[dict[str, Leaf], dict[str, View]]:
    """Return the leaves by name, and the view of each tensor that is not a whole leaf.

    Tensors of one storage whose memory overlaps share one leaf. Every other tensor has its own
    contiguous leaf, without the rest of its storage. `layouts` are those of the tensors.
    """
    leaves: dict[str, Leaf] = {}
    views: dict[str, View] = {}
    for names in _of_one_storage(tensors):
        for group in _overlapping([_Span.of(name, tensors[name]) for name in names]):
            if len(group) > 1:
                _share_one(group, leaves, views)
    for (name, tensor), layout in zip(tensors.items(), layouts, strict=True):
        if name in views:
            continue
        dtype = layout.dtype_name
        if dtype in DTYPES:  # as `of_tensor` makes it, in a fifth of the time
            leaves[name] = _new(Leaf, (dtype, layout.shape, layout.size_bytes, tensor))
        else:
            leaves[name] = Leaf.of_tensor(tensor)
            views[name] = View(leaf=name, layout=_layout(_contiguous(tensor), 0))
    return leaves, views


def _of_one_storage(tensors: Mapping[str, torch.Tensor]) -> Iterable[list[str]]:
    """Return the names of tensors that share a device and start address of their storages.

    Empty tensors are left out.
    """
    storages = map(torch.Tensor.untyped_storage, tensors.values())
    begins = list(map(torch.UntypedStorage.data_ptr, storages))
    if len(set(begins)) == len(begins):
        return ()
    first: dict[torch.device, dict[int, str]] = {}
    found: dict[tuple[torch.device, int], list[str]] = {}
    for (name, tensor), begin in zip(tensors.items(), begins, strict=True):
        if tensor.numel():
            device = tensor.device
            other = first.setdefault(device, {}).setdefault(begin, name)
            if other is not name:
                found.setdefault((device, begin), [other]).append(name)
    return found.values()


def _overlapping(spans: list[_Span]) -> list[list[_Span]]:
    """Group the spans of one storage: spans that overlap are in the same group."""
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
        # Two storages can begin at one address: torch.from_numpy of the same array, twice. The
        # largest of them contains the whole group.
        storages = [span.tensor.untyped_storage() for span in group]
        storage = max(storages, key=lambda one: one.nbytes())
        begin -= (begin - storage.data_ptr()) % ALIGNMENT
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
    """Return a contiguous meta tensor, without memory, of the same shape and dtype."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _layout(tensor: torch.Tensor, offset: int) -> dict[str, Any]:
    return {
        "dtype": dtype_name(tensor.dtype),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "offset": offset,
    }
