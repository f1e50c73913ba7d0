"""DcpFile: the layout of a file of torch.distributed.checkpoint (DCP) with many tensors.

DCP's file is a row of small torch files, one per tensor, each as `torch.save` writes it to a
stream; `.metadata` has their offsets and lengths. Their bytes around the data depend on dtype,
shape and the CRC32 of the data alone. So the layout is known before a byte is copied.

template: such a file without data, for all contiguous tensors of one dtype and shape; torch takes
150 us to make one. There is none where `torch_image` has no image.
"""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from isal import isal_zlib

from iobench.errors import UnavailableError
from iobench.formats import torch_image
from iobench.formats.many_parts import CheckedImage, Numbers, RunningChecksums
from iobench.formats.tensor_layouts import FileLayout
from iobench.formats.torch_image import Missing
from iobench.units import MIB
from iobench.writers.blocks.pages import fresh_pages
from iobench.writers.image import AnyMemory, Bytes, FileImage

ALIGNMENT = 64
"""Of the data in the file, like in a file of torch.save: for fast copies."""
_GROUP = 16 << 20
"""Bytes of the tensors whose checksums one thread computes at a time, or one larger tensor."""
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
    return TensorFile(head=text[:start], size_bytes=size, text=text, missing=layout.missing)


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


class DcpItem(NamedTuple):
    """A tensor of the file: torch's file of `length` bytes at `start`; its data are within.

    The padding up to the next item belongs to `stop`.
    """

    start: int
    length: int
    stop: int
    data_start: int
    data_bytes: int
    template: TensorFile | None
    """None for a tensor without elements, whose file never changes."""


class DcpFile:
    """The bytes of such a file around the data of its tensors, for contiguous CPU tensors."""

    def __init__(self, tensors: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> None:
        """Take dtype and shape of each tensor. Raises UnavailableError for an unknown torch."""
        found = settings()
        self.items = list[DcpItem]()
        text = bytearray()
        cuts = [0]  # of `text`, at the data
        position = 0
        for dtype, shape in tensors:
            item, head, tail = _item(position, dtype, shape, found)
            text += head
            if item.data_bytes:
                cuts.append(len(text))
            text += tail
            position = item.stop
            self.items.append(item)
        self.size_bytes = position
        self._stored = [item for item in self.items if item.data_bytes]
        self._text, self._cuts = bytes(text), [*cuts, len(text)]
        sizes = [item.data_bytes for item in self._stored]
        self._layout = FileLayout(self._text, sizes, self._cuts[1:-1])

    def image(
        self, path: str, addresses: Numbers, apart: Mapping[int, Bytes], owners: object
    ) -> FileImage:
        """Return the file on the data of the tensors with elements at `addresses`, to be copied.

        A tensor whose number among them is in `apart` is there. `owners` keep the memory alive.
        The image has other checksums.
        """
        if not self.size_bytes:
            return FileImage.of(path, [])
        return self._layout.image(path, addresses, apart, owners)

    def image_of(
        self, path: str, data: Sequence[AnyMemory], *, checked: bool, end: bytes = b""
    ) -> FileImage:
        """Return the file, then `end`, on the `data` of the tensors with elements.

        Some of these may be on a device; they are read after what this thread has queued there.
        Without `checked` the image has other checksums.
        """
        held = np.frombuffer(bytearray(self._text + end), dtype=np.uint8)
        cuts = [*self._cuts[:-1], len(held)]
        texts = [held[start:stop] for start, stop in itertools.pairwise(cuts)]
        parts = [texts[0], *itertools.chain(*zip(data, texts[1:], strict=True))]
        if not checked:
            return FileImage.of_parts(path, parts)
        return CheckedImage(path, parts, _checksums(self._stored, data, texts[1:]))

    def streamed(self, checksum: Callable[[], int]) -> Iterator[Bytes | int]:
        """Yield the file in order: text, and the number of each tensor in place of its data.

        `checksum` then returns the CRC32 of the data. A tensor without elements is text.
        """
        text = np.frombuffer(bytearray(self._text), dtype=np.uint8)
        yield text[: self._cuts[1]]
        filled = [number for number, item in enumerate(self.items) if item.data_bytes]
        for number, (cut, stop) in zip(filled, itertools.pairwise(self._cuts[1:]), strict=True):
            yield number
            template = self.items[number].template
            assert template is not None
            tail = np.frombuffer(template.tail(checksum()), dtype=np.uint8)
            text[cut : cut + len(tail)] = tail
            yield text[cut:stop]

    def image_in(self, path: str, memory: Bytes, end: bytes, *, begin: int = 0) -> FileImage:
        """Return the file in `memory`, and then `end`. The checksums are written into `memory`.

        Those of tensors before `begin` are in it already, if they are needed.
        """
        held = np.frombuffer(bytearray(end), dtype=np.uint8)
        stored = [one for one in self._stored if one.start >= begin]
        stops = [one.data_start + one.data_bytes for one in stored]
        data = [memory[one.data_start : stop] for one, stop in zip(stored, stops, strict=True)]
        checksums = _checksums(stored, data, [memory[stop:] for stop in stops])
        return CheckedImage(path, [memory[: self.size_bytes], held], checksums)


def _checksums(
    items: Sequence[DcpItem], data: Sequence[AnyMemory], tails: Sequence[Bytes]
) -> dict[int, RunningChecksums]:
    """Return the CRC32s of `data`, in groups of tensors by the offset of the first one.

    `tails` is the memory behind the data of each of `items`, which gets them.
    """
    at = {item.data_start: number for number, item in enumerate(items)}

    def put(start: int, checksum: int) -> None:
        number = at[start]
        template = items[number].template
        assert template is not None
        tail = np.frombuffer(template.tail(checksum), dtype=np.uint8)
        np.copyto(tails[number][: len(tail)], tail)

    groups: dict[int, dict[int, AnyMemory]] = {}
    begin = None
    for item, memory in zip(items, data, strict=True):
        if begin is None:
            begin = item.start
        groups.setdefault(begin, {})[item.data_start] = memory
        if item.stop - begin >= _GROUP:
            begin = None
    return {begin: RunningChecksums(group, put) for begin, group in groups.items()}


def _item(
    start: int, dtype: torch.dtype, shape: tuple[int, ...], found: Settings
) -> tuple[DcpItem, bytes, bytes]:
    """Return an item, and its bytes before the data and after them, with padding."""
    if 0 in shape:
        head, tail, size, made = _empty(dtype, shape, found), b"", 0, None
    else:
        made = template(dtype, shape, found)
        if made is None:
            raise UnavailableError(
                "a DCP checkpoint",
                f"the file that torch {torch.__version__} writes for {dtype} {list(shape)} is "
                "unknown to this iobench.",
                "Use torch 2.13, or dcp.save.",
            )
        head, tail, size = made.head, made.text[len(made.head) :], made.size_bytes
    length = len(head) + size + len(tail)
    padding = -(start + length) % ALIGNMENT
    item = DcpItem(start, length, start + length + padding, start + len(head), size, made)
    return item, head, tail + bytes(padding)


@functools.lru_cache(maxsize=256)
def _empty(dtype: torch.dtype, shape: tuple[int, ...], _settings: Settings) -> bytes:
    """Return torch's file of a tensor without elements; `_settings` are part of the key."""
    stream = io.BytesIO()
    torch.save(torch.empty(shape, dtype=dtype, device="cpu"), stream)
    return stream.getvalue()
