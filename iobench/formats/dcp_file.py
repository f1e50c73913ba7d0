"""DcpFile: the layout of a file of torch.distributed.checkpoint (DCP) with many tensors.

DCP's file is a row of small torch files, one per tensor, each as `torch.save` writes it to a
stream; `.metadata` has their offsets and lengths. Their bytes around the data depend on dtype,
shape and the CRC32 of the data alone. So the layout is known before a byte is copied.
"""

from __future__ import annotations

import functools
import io
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from iobench.errors import UnavailableError
from iobench.formats import torch_tensor
from iobench.formats.checked_image import RunningChecksums
from iobench.formats.many_parts import Numbers, PartsImage
from iobench.formats.tensor_layouts import FileLayout
from iobench.formats.torch_tensor import Settings, TensorFile
from iobench.writers.device.staging import DeviceCopies, StagedImage
from iobench.writers.image import AnyMemory, Bytes, FileImage, HostBytes, WrappedImage

ALIGNMENT = 64
"""Of the data in the file, like in a file of torch.save: for fast copies."""
_GROUP = 16 << 20
"""Bytes of the tensors whose checksums one thread computes at a time, or one larger tensor."""


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
        settings = torch_tensor.settings()
        self.items = list[DcpItem]()
        text = bytearray()
        cuts = [0]  # of `text`, at the data
        position = 0
        for dtype, shape in tensors:
            item, head, tail = _item(position, dtype, shape, settings)
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
        plain = PartsImage(path, [texts[0], *itertools.chain(*zip(data, texts[1:], strict=True))])
        if not checked:
            return plain
        return _checked(plain, _Checksums(self._stored, data, texts[1:]))

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
        checksums = _Checksums(stored, data, [memory[stop:] for stop in stops])
        return _checked(PartsImage(path, [memory[: self.size_bytes], held]), checksums)


class _Checksums:
    """The CRC32s of the data of tensors, each in the memory behind the data when it is needed.

    In groups of tensors: a thread that takes a part of the file computes those of its groups only,
    and waits for no thread that takes another part.
    """

    def __init__(
        self, items: Sequence[DcpItem], data: Sequence[AnyMemory], tails: Sequence[Bytes]
    ) -> None:
        """`tails` is the memory behind the data of each of `items`."""
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._groups: list[RunningChecksums] = []
        at = {item.data_start: number for number, item in enumerate(items)}

        def put(start: int, checksum: int) -> None:
            number = at[start]
            template = items[number].template
            assert template is not None
            tail = np.frombuffer(template.tail(checksum), dtype=np.uint8)
            np.copyto(tails[number][: len(tail)], tail)

        group: dict[int, AnyMemory] = {}
        for number, (item, memory) in enumerate(zip(items, data, strict=True)):
            if not group:
                self._starts.append(item.start)
            group[item.data_start] = memory
            if item.stop - self._starts[-1] >= _GROUP or number + 1 == len(items):
                self._stops.append(item.stop)
                self._groups.append(RunningChecksums(group, put))
                group = {}

    def reach(self, start: int, stop: int, host_bytes: HostBytes) -> None:
        """Put those that are between `start` and `stop` of the file."""
        first, last = bisect_right(self._stops, start), bisect_left(self._starts, stop)
        for group in self._groups[first:last]:
            group.reach(stop, host_bytes)


def _checked(plain: PartsImage, checksums: _Checksums) -> FileImage:
    """Return `plain`, whose `checksums` are put when a range of it is taken."""
    devices, on_host = plain.devices(), plain.host_bytes
    if devices:
        copies = DeviceCopies(devices)
        staged = StagedImage(plain, _copies=copies, _device=devices[0], _unpinned={})
        on_host = staged.host_bytes
    return _CheckedImage(plain, _checksums=checksums, _on_host=on_host)


class _CheckedImage(WrappedImage):
    _checksums: _Checksums
    _on_host: HostBytes

    def pieces(self, start: int, stop: int) -> list[AnyMemory]:
        self._checksums.reach(start, stop, self._on_host)
        return super().pieces(start, stop)


def _item(
    start: int, dtype: torch.dtype, shape: tuple[int, ...], settings: Settings
) -> tuple[DcpItem, bytes, bytes]:
    """Return an item, and its bytes before the data and after them, with padding."""
    if 0 in shape:
        head, tail, size, made = _empty(dtype, shape, settings), b"", 0, None
    else:
        made = torch_tensor.template(dtype, shape, settings)
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
