"""SafetensorsLayout: header and order of a safetensors file, kept for the next file like it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import torch

from iobench.formats.collector import collector_paused
from iobench.formats.many_parts import ScatteredImage
from iobench.formats.safetensors_header import header_bytes
from iobench.formats.tensor_layouts import FileLayout, TensorLayouts, all_plain, numbers
from iobench.formats.tensors import dtype_name, tensor_bytes

__all__ = ["image_on_cpu"]

_KEPT = 4
"""Layouts kept: the files of a rank, such as weights, moments and an average."""


class _Layout:
    """The layout of a file of tensors in host memory. It keeps no tensor alive."""

    def __init__(
        self, names: list[str], tensors: list[torch.Tensor], metadata: dict[str, str]
    ) -> None:
        """Raises ValueError for what safetensors cannot hold."""
        described = [
            (name, dtype_name(tensor.dtype), tensor.shape)
            for name, tensor in zip(names, tensors, strict=True)
        ]
        header, places = header_bytes(described, metadata)
        number = {name: at for at, name in enumerate(names)}
        stored = [
            (number[name], end - begin) for name, (begin, end) in places.items() if begin < end
        ]
        self.names, self.metadata = names, metadata
        self.layouts = TensorLayouts(tensors)
        self._order = numbers(at for at, _ in stored)
        self._copied = [
            (at, tensor)
            for at, (tensor, _) in enumerate(stored)
            if not tensors[tensor].is_contiguous()
        ]
        self._file = FileLayout(header, [size for _, size in stored])

    def image(self, path: str, tensors: list[torch.Tensor]) -> ScatteredImage | None:
        """Return the image of other tensors; None if they are of another layout."""
        located = self.layouts.locate(tensors)
        if located is None:
            return None
        copies = {at: tensor_bytes(tensors[number]) for at, number in self._copied}
        addresses = located.addresses[self._order]
        return self._file.image(path, addresses, copies, owners=located.owners)


_recent: deque[_Layout] = deque(maxlen=_KEPT)


def image_on_cpu(
    path: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None
) -> ScatteredImage | None:
    """Return the image of a safetensors file; None if a tensor is not plain memory of the host.

    Raises ValueError for what safetensors cannot hold. The layouts of the last files are kept: a
    file of the same names, metadata, dtypes, shapes and strides needs no header made again.
    """
    names, values, marks = list(tensors), list(tensors.values()), dict(metadata or {})
    if not all_plain(values) or not all(map(_is_dense_on_cpu, values)):
        return None
    for layout in tuple(_recent):
        if layout.names == names and layout.metadata == marks:
            image = layout.image(path, values)
            if image is not None:
                return image
    with collector_paused():
        layout = _Layout(names, values, marks)
        image = layout.image(path, values)
    if image is not None:
        _recent.append(layout)
    return image


def _is_dense_on_cpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_nested
