"""The torch file of one small tensor in a stream, without torch's pickler and zip writer.

torch takes 150 us for such a file. Of a contiguous tensor, it depends on dtype, shape and data
alone. So one file is laid out for all tensors that have the first two in common; only the data and
what depends on their CRC32 differ. There is no template where `torch_image` has no image.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from isal import isal_zlib

from iobench.formats import torch_image
from iobench.formats.torch_image import Missing
from iobench.units import MIB
from iobench.writers.blocks.pages import fresh_pages
from iobench.writers.image import Bytes

_LARGEST = MIB  # a larger tensor takes longer to store than torch takes for its file


class Settings(NamedTuple):
    """Settings of torch that its file of a tensor depends on."""

    crc: bool
    alignment: int
    packages: int
    """Number of the functions that name a storage's device."""


def settings() -> Settings:
    stock: Any = torch.serialization
    alignment = getattr(stock, "_get_storage_alignment", lambda: 64)  # not in older torch
    return Settings(stock.get_crc32_options(), alignment(), len(stock._package_registry))


@dataclass(frozen=True, kw_only=True)
class TensorFile:
    """The file of a tensor: `head`, its `size_bytes` of data, and a tail."""

    head: bytes = field(repr=False)
    size_bytes: int
    text: bytes = field(repr=False)
    """All but the data, without their CRC32 and what depends on it."""
    missing: Missing | None = field(repr=False)
    """The positions of these in `text`; None without CRC32."""

    def tail(self, checksum: int) -> bytes | bytearray:
        """Return the bytes after data whose CRC32 is `checksum`."""
        text = bytearray(self.text)
        if self.missing is not None:
            self.missing.put(text, [checksum])
        return text[len(self.head) :]


def plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the contiguous tensor, on the CPU or a GPU, whose file has a template.

    It is detached, and a copy on the CPU if `tensor` is not contiguous. None if torch must make the
    file.
    """
    found = tensor.detach()
    if (
        not torch_image.is_like_stock()
        or type(found) is not torch.Tensor
        or found.layout is not torch.strided
        or found.is_quantized
        or found.is_nested
        or found.is_conj()
        or found.is_neg()
        or getattr(found, "has_names", bool)()  # torch 2.13 has no named tensors
    ):
        return None
    if found.device.type not in ("cpu", "cuda") or not found.is_contiguous():
        found = found.cpu().contiguous()
    return found


@functools.lru_cache(maxsize=4096)
def template(dtype: torch.dtype, shape: tuple[int, ...], found: Settings) -> TensorFile | None:
    """Return the file of a contiguous CPU tensor with elements; None if torch must make it.

    No memory of the tensor's size is touched.
    """
    size = torch.Size(shape).numel() * dtype.itemsize
    sample = torch.from_numpy(fresh_pages(size, huge=False)).view(dtype).view(shape)
    layout = torch_image.layout(torch_image.STREAM, sample, crc=found.crc)
    if layout is None:
        return None
    ((start, size),) = layout.sizes.items()
    text = bytes(layout.text)
    return TensorFile(
        head=text[:start],
        size_bytes=size,
        text=text,
        missing=layout.missing,
    )


def view(
    file: Bytes, dtype: torch.dtype, shape: tuple[int, ...], found: Settings
) -> torch.Tensor | None:
    """Return the contiguous tensor of a file in a stream, whose every byte is like torch's.

    It is a view of `file`, which may not be aligned. Returns None if torch must read the file: it
    has another tensor, settings or torch version, or it is damaged.
    """
    made = None
    if 0 < torch.Size(shape).numel() * dtype.itemsize <= _LARGEST:
        made = template(dtype, shape, found)
    if made is None:
        return None
    start = len(made.head)
    stop = start + made.size_bytes
    data = file[start:stop]
    if file[:start].tobytes() != made.head or len(data) < made.size_bytes:
        return None
    if file[stop:].tobytes() != made.tail(isal_zlib.crc32(data)):
        return None
    return torch.from_numpy(data).view(dtype).view(shape)
