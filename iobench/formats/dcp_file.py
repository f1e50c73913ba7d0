"""DcpFile: the layout of a file of torch.distributed.checkpoint (DCP) with many tensors.

DCP's file is a row of small torch files, one per tensor, each as `torch.save` writes it to a
stream; `.metadata` has their offsets and lengths. Their bytes around the data depend on dtype,
shape and the CRC32 of the data alone. So the layout is known before a byte is copied.
"""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from isal import isal_zlib

from iobench.errors import UnavailableError
from iobench.formats import torch_tensor
from iobench.formats.many_parts import Numbers, ScatteredImage
from iobench.formats.tensor_layouts import numbers
from iobench.formats.torch_tensor import Settings, TensorFile
from iobench.writers.blocks.workers import map_in_workers
from iobench.writers.image import Bytes, FileImage

__all__ = ["ALIGNMENT", "DcpFile", "DcpItem"]

ALIGNMENT = 64
"""Of the data in the file, like in a file of torch.save: for fast copies."""
_THREADS = 2


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
        lengths = [0] * (2 * len(self._stored) + 1)
        lengths[::2] = [stop - start for start, stop in itertools.pairwise(self._cuts)]
        lengths[1::2] = [item.data_bytes for item in self._stored]
        self._lengths = lengths

    @property
    def sample(self) -> bytes:
        """The text for any data, with checksums that are not theirs."""
        return self._text

    def text(self, data: Sequence[Bytes]) -> bytes:
        """Return the text for the data of the tensors with elements, in order."""
        text, checksums = bytearray(self._text), _checksums(data)
        for item, cut, checksum in zip(self._stored, self._cuts[1:], checksums, strict=False):
            assert item.template is not None
            tail = item.template.tail(checksum)
            text[cut : cut + len(tail)] = tail
        return bytes(text)

    def image(
        self,
        path: str,
        text: bytes,
        addresses: Numbers,
        apart: Mapping[int, Bytes],
        owners: object,
        *,
        end: bytes = b"",
    ) -> FileImage:
        """Return the file, then `end`, on the data of the tensors with elements at `addresses`.

        A tensor whose number among them is in `apart` is there. `owners` keep the memory alive.
        """
        held = np.frombuffer(text + end, dtype=np.uint8)
        if not len(held):
            return FileImage.of(path, [])
        lengths = numbers(self._lengths)
        lengths[-1] += len(end)
        places = np.empty(len(lengths), dtype=np.int64)
        places[::2] = numbers(self._cuts[:-1]) + held.ctypes.data
        places[1::2] = addresses
        for number, memory in apart.items():
            places[2 * number + 1] = memory.ctypes.data
        filled = lengths > 0  # the text of a file without tensors may be empty
        lengths, places = lengths[filled], places[filled]
        starts = list(itertools.accumulate(lengths.tolist(), initial=0))[:-1]
        return ScatteredImage(
            path, starts=starts, addresses=places, lengths=lengths, owners=(held, apart, owners)
        )

    def texts(self) -> list[tuple[int, Bytes]]:
        """Return the offset in the file and the bytes of each part of the sample text."""
        whole = np.frombuffer(self._text, dtype=np.uint8)
        starts = list(itertools.accumulate(self._lengths, initial=0))[:-1][::2]
        return [
            (start, whole[cut:stop])
            for start, (cut, stop) in zip(starts, itertools.pairwise(self._cuts), strict=True)
        ]

    def data(self, memory: Bytes) -> list[Bytes]:
        """Return the data of the tensors with elements in `memory`, which holds the file."""
        return [memory[one.data_start : one.data_start + one.data_bytes] for one in self._stored]

    def put_checksums(self, memory: Bytes) -> None:
        """Write the checksums of the data into `memory`, which holds the file."""
        for item, checksum in zip(self._stored, _checksums(self.data(memory)), strict=True):
            assert item.template is not None
            tail = np.frombuffer(item.template.tail(checksum), dtype=np.uint8)
            stop = item.data_start + item.data_bytes
            np.copyto(memory[stop : stop + len(tail)], tail)


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
        head, tail, size = made.head, made.sample, made.size_bytes
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


def _checksums(data: Sequence[Bytes]) -> list[int]:
    return map_in_workers(_THREADS, lambda one: int(isal_zlib.crc32(one)), data)
