"""SafetensorsLayout: header and order of a safetensors file, kept for the next file like it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping

import torch

from iobench.formats.collector import collector_paused
from iobench.formats.late_image import LateLayout
from iobench.formats.safetensors_header import header_bytes
from iobench.formats.tensor_layouts import (
    FileLayout,
    TensorLayouts,
    all_plain,
    are_strided,
    numbers,
)
from iobench.formats.tensors import tensor_bytes
from iobench.writers.image import FileImage

__all__ = ["image_on_cpu"]

_KEPT = 4
"""Layouts kept: the files of a rank, such as weights, moments and an average."""

_COMPARED = 16
"""Tensors that show which of several layouts with the same names a file has, as a rule."""


class _Layout:
    """The layout of a file of tensors in host memory. It keeps no tensor alive."""

    def __init__(
        self, names: list[str], tensors: list[torch.Tensor], metadata: dict[str, str]
    ) -> None:
        """Raises ValueError for what safetensors cannot hold."""
        self.names, self.metadata = names, metadata
        self.layouts = TensorLayouts(tensors)
        described = [
            (name, layout.dtype_name, layout.shape)
            for name, layout in zip(names, self.layouts.each, strict=True)
        ]
        header, sizes = header_bytes(described, metadata)
        number = dict(zip(names, itertools.count()))
        stored = [(number[name], size) for name, size in sizes.items() if size]
        self._order = numbers(at for at, _ in stored)
        self._copied = [
            (at, tensor)
            for at, (tensor, _) in enumerate(stored)
            if not self.layouts.each[tensor].contiguous
        ]
        self._file = FileLayout(header, [size for _, size in stored])
        self._late: LateLayout | None = None
        if not self._copied:
            self._late = LateLayout.of(self._file, self.layouts, self._order)

    def image(self, path: str, tensors: list[torch.Tensor], *, late: bool) -> FileImage | None:
        """Return the image of other tensors; None if they are of another layout.

        With `late` it may be a LateImage, and only the first tensors are compared here.
        """
        if late and self._late is not None:
            alike = self.layouts.locate_part(tensors[:_COMPARED], 0) is not None
            return self._late.image(path, tensors) if alike else None
        located = self.layouts.locate(tensors)
        if located is None:
            return None
        copies = {at: tensor_bytes(tensors[number]) for at, number in self._copied}
        addresses = located.addresses[self._order]
        return self._file.image(path, addresses, copies, owners=located.owners)


_recent: deque[_Layout] = deque(maxlen=_KEPT)


def image_on_cpu(
    path: str,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None,
    *,
    late: bool = False,
) -> FileImage | None:
    """Return the image of a safetensors file; None if a tensor is not plain memory of the host.

    With `late` it may be a LateImage, which compares the tensors when a writer takes their bytes.

    Raises ValueError for what safetensors cannot hold. The layouts of the last files are kept: a
    file of the same names, metadata, dtypes, shapes and strides needs no header made again.
    """
    names, values, marks = list(tensors), list(tensors.values()), dict(metadata or {})
    if not all_plain(values):
        return None
    for layout in reversed(tuple(_recent)):
        if layout.names == names and layout.metadata == marks:
            image = layout.image(path, values, late=late)
            if image is not None:
                return image
    if not are_strided(values) or not all(tensor.is_cpu for tensor in values):
        return None
    with collector_paused():
        layout = _Layout(names, values, marks)
        image = layout.image(path, values, late=False)
    if image is not None:
        _recent.append(layout)
    return image
