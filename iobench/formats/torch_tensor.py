"""The torch file of one small tensor in a stream, without torch's pickler and zip writer.

torch takes 150 us for such a file. It depends on dtype, shape, strides and data alone. So torch
makes one file for all tensors that have the first three in common; only the data and what depends
on their CRC32 differ. A file that differs from torch's has no template.
"""

from __future__ import annotations

import ctypes
import functools
import io
import struct
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from isal import isal_zlib

from iobench.errors import DataMismatchError
from iobench.formats import torch_image
from iobench.formats.torch_index import TorchIndex
from iobench.formats.torch_settings import crc32_setting
from iobench.formats.torch_zip import HASH_DIGITS, hash_combine
from iobench.units import MIB
from iobench.writers.blocks.pages import fresh_pages
from iobench.writers.image import Bytes
from iobench.writers.source import BytesSource

__all__ = ["Settings", "TensorFile", "file_parts", "settings", "template", "view"]

_LARGEST = MIB  # a larger tensor takes longer to store than torch takes for its file
_CHECKSUM = struct.Struct("<L")


class Settings(NamedTuple):
    """Settings of torch that its file of a tensor depends on."""

    crc: bool
    alignment: int
    packages: int
    """Number of the functions that name a storage's device."""


def settings() -> Settings:
    """Return torch's settings now."""
    stock: Any = torch.serialization
    alignment = getattr(stock, "_get_storage_alignment", lambda: 64)  # not in older torch
    return Settings(stock.get_crc32_options(), alignment(), len(stock._package_registry))


@dataclass(frozen=True, kw_only=True)
class TensorFile:
    """The file of a tensor: `head`, its `size_bytes` of data, and a tail."""

    head: bytes = field(repr=False)
    size_bytes: int
    sample: bytes = field(repr=False)
    """The tail of one tensor."""
    checksums_at: tuple[int, ...]
    """Positions of the CRC32 of the data in the tail; none without CRC32."""
    id_checksums_at: tuple[int, ...]
    """Positions of the CRC32 of the serialization id."""
    id_at: int
    before: int
    """The combined CRC32s of the records before the data."""
    after: tuple[int, ...]
    """The CRC32s of those after the data."""

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return len(self.head) + self.size_bytes + len(self.sample)

    def tail(self, checksum: int) -> bytes | bytearray:
        """Return the bytes after data whose CRC32 is `checksum`."""
        if not self.checksums_at:
            return self.sample
        tail = bytearray(self.sample)
        combined = hash_combine(self.before, checksum)
        for other in self.after:
            combined = hash_combine(combined, other)
        at, stop = self.id_at, self.id_at + 2 * HASH_DIGITS
        tail[at + HASH_DIGITS : stop] = b"%020d" % combined
        for place in self.checksums_at:
            _CHECKSUM.pack_into(tail, place, checksum)
        own = isal_zlib.crc32(tail[at:stop])
        for place in self.id_checksums_at:
            _CHECKSUM.pack_into(tail, place, own)
        return tail


def file_parts(tensor: torch.Tensor, found: Settings) -> tuple[Any, ...] | None:
    """Return the bytes of `torch.save(tensor, stream)` in parts; None if torch must make them.

    `tensor` is on the CPU and has a storage of its own size.
    """
    if (
        type(tensor) is not torch.Tensor
        or tensor.layout is not torch.strided
        or tensor.requires_grad
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor.storage_offset()
        or getattr(tensor, "has_names", bool)()  # torch 2.13 has no named tensors
        or tensor.__dict__
        or not 0 < tensor.nbytes <= _LARGEST
    ):
        return None
    made = _template(tensor.dtype, tuple(tensor.shape), tensor.stride(), found)
    if made is None:
        return None
    data = ctypes.string_at(tensor.data_ptr(), made.size_bytes)
    return made.head, data, made.tail(isal_zlib.crc32(data))


def template(dtype: torch.dtype, shape: tuple[int, ...], found: Settings) -> TensorFile | None:
    """Return the file of a contiguous CPU tensor with elements; None if torch must make it.

    No memory of the tensor's size is touched.
    """
    size = torch.Size(shape).numel() * dtype.itemsize
    return _contiguous(dtype, shape, found) if size <= _LARGEST else _large(dtype, shape, found)


@functools.lru_cache(maxsize=4096)
def _large(dtype: torch.dtype, shape: tuple[int, ...], found: Settings) -> TensorFile | None:
    size = torch.Size(shape).numel() * dtype.itemsize
    untouched = torch.from_numpy(fresh_pages(size, huge=False)).view(dtype).view(shape)
    layout = torch_image.stream_layout(untouched, crc=found.crc)
    if layout is None or list(layout.sizes.values()) != [size]:
        return None
    (start,), missing = layout.sizes, layout.missing
    head, sample = bytes(layout.text[:start]), bytes(layout.text[start:])
    if missing is None:
        none: tuple[int, ...] = ()
        return TensorFile(
            head=head,
            size_bytes=size,
            sample=sample,
            checksums_at=none,
            id_checksums_at=none,
            id_at=0,
            before=0,
            after=none,
        )
    id_at = missing.id_start - start
    return TensorFile(
        head=head,
        size_bytes=size,
        sample=sample,
        checksums_at=(missing.descriptors[0] - start, missing.entries[0] - start),
        id_checksums_at=(id_at + 2 * HASH_DIGITS + 4, missing.id_entry - start),
        id_at=id_at,
        before=missing.before,
        after=tuple(missing.after),
    )


def view(
    file: Bytes, dtype: torch.dtype, shape: tuple[int, ...], found: Settings
) -> torch.Tensor | None:
    """Return the contiguous tensor of a file in a stream, whose every byte is like torch's.

    It is a view of `file`, which may not be aligned. Returns None if torch must read the file: it
    has another tensor, settings or torch version, or it is damaged.
    """
    made = _contiguous(dtype, shape, found)
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


@functools.lru_cache(maxsize=4096)
def _contiguous(dtype: torch.dtype, shape: tuple[int, ...], found: Settings) -> TensorFile | None:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    if not 0 < torch.Size(shape).numel() * dtype.itemsize <= _LARGEST:
        return None
    return _template(dtype, shape, tuple(reversed(strides)), found)


@functools.lru_cache(maxsize=4096)
def _template(
    dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], found: Settings
) -> TensorFile | None:
    """Return the file of such a tensor; None if torch's is not as expected."""
    size = torch.Size(shape).numel() * dtype.itemsize
    sample = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    storage = sample.untyped_storage()
    if storage.nbytes() != size:
        return None
    torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).fill_(1)
    stream = io.BytesIO()
    with crc32_setting(found.crc):
        torch.save(sample, stream)
    file = stream.getvalue()
    try:
        made = _read(file, found.crc)
    except (DataMismatchError, LookupError, ValueError):
        return None
    data = file[len(made.head) : len(made.head) + size]
    whole = (made.head, data, made.tail(isal_zlib.crc32(data)))
    return made if made.size_bytes == size and b"".join(whole) == file else None


def _read(file: bytes, crc: bool) -> TensorFile:
    """Return torch's `file` of one tensor as a template. Raises DataMismatchError, ValueError."""
    source = BytesSource(file)
    index = TorchIndex.read("the file of a tensor", source)
    (start,), (stop,) = index.starts, index.stops
    directory = index.directory
    numbers = {name.partition("/")[2]: number for number, name in enumerate(directory.names)}
    own, last = numbers["data/0"], numbers[".data/serialization_id"]
    (id_at,) = directory.data_starts(source, [last])
    before = 0
    for number in range(own):
        if directory.sizes[number]:
            before = hash_combine(before, directory.checksums[number])
    entries = [directory.start - stop + entry + 16 for entry in directory.entries]  # APPNOTE 4.3.12
    id_at -= stop
    return TensorFile(
        head=file[:start],
        size_bytes=stop - start,
        sample=file[stop:],
        checksums_at=(4, entries[own]) if crc else (),  # of the descriptor, APPNOTE 4.3.9
        id_checksums_at=(id_at + 2 * HASH_DIGITS + 4, entries[last]),
        id_at=id_at,
        before=before,
        after=tuple(directory.checksums[own + 1 : last]),
    )
