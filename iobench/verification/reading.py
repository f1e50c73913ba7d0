"""Reads every byte of an inventory once, and compares what has a checksum.

ValueCounts: the NaN, the infinities, and the tensors of zeros alone, counted meanwhile.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import xxhash
from isal import isal_zlib

from iobench import linux
from iobench.errors import DataMismatchError, TransferError
from iobench.formats.read_ahead import FileRange, read_ahead
from iobench.units import MIB
from iobench.verification.inventory import (
    CheckedRange,
    ListedFile,
    ListedTensor,
    TensorPart,
    VerifyInventory,
    unreadable,
)
from iobench.writers.image import Bytes

OnRead = Callable[[int, int], None]
"""Gets the bytes that were read, and those to read in all."""

_WINDOW = 32 * MIB
_EDGE = 8  # bytes of the widest value


class Layer:
    """Gets the bytes of ranges as they come, in the order of the file.

    `begin` returns for a range what takes its bytes (`update`), and `end` gets that afterwards.
    """

    def __init__(
        self,
        ranges: Iterable[CheckedRange],
        begin: Callable[[CheckedRange], Any],
        end: Callable[[CheckedRange, Any], None],
    ) -> None:
        self._ranges = sorted(ranges)
        self._begin, self._end = begin, end
        self._number = 0
        self._state: Any = None

    def take(self, start: int, data: Bytes) -> None:
        """Take the next bytes of the file, from `start` on."""
        stop = start + len(data)
        while self._number < len(self._ranges):
            one = self._ranges[self._number]
            begin, end = max(one.start, start), min(one.stop, stop)
            if self._state is None and (begin < end or one.stop <= stop):
                self._state = self._begin(one)
            if begin < end:
                self._state.update(data[begin - start : end - start])
            if one.stop > stop:
                return
            self._end(one, self._state)
            self._state = None
            self._number += 1


class RangeCheck:
    """Compares the bytes of a range with its XXH3-64, its CRC-32 or a local header of a zip."""

    def __init__(self, one: CheckedRange) -> None:
        self._one, self._crc, self._head = one, 0, b""
        self._hash = xxhash.xxh3_64() if one.xxh3_64 else None

    def update(self, data: Bytes) -> None:
        if self._hash is not None:
            self._hash.update(data.data)
        elif self._one.head:
            self._head += data.tobytes()
        else:
            self._crc = isal_zlib.crc32(data, self._crc)

    def difference(self) -> str:
        """Return what differs when all bytes were taken; empty if nothing does."""
        one, head = self._one, self._head
        if self._hash is not None:
            same, what = self._hash.hexdigest() == one.xxh3_64, "its XXH3 checksum differs"
        elif one.head:
            same = head.startswith(b"PK\x03\x04") and head[30 : 30 + len(one.head)] == one.head
            what = "its header in the zip differs"
        else:
            same, what = one.crc32 is None or self._crc == one.crc32, "its CRC-32 differs"
        return "" if same else what


class _Holes:
    """Finds whole pages of zeros, such as a file system leaves after a power cut."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []
        """[start, stop) of zeros with another byte directly before and after, in whole pages."""
        self._start: int | None = None
        self._last = b"\1" * _EDGE  # before the file is no zero
        self._stop = 0

    def take(self, start: int, data: Bytes) -> None:
        """Take the next bytes of the file; `start` is the begin of a page."""
        whole = len(data) - len(data) % linux.PAGE
        words = data[:whole].view(np.uint64).reshape(-1, linux.PAGE // 8)
        maybe = np.flatnonzero(words[:, 0] == 0)
        zero = maybe[~np.any(words[maybe], axis=1)].tolist()
        if len(data) > whole and not data[whole:].any():
            zero.append(whole // linux.PAGE)
        at = 0
        for number in zero:
            if number > at:
                self._end(start, at, data)
            if number > at or not number:
                self._begin(start, number, data)
            at = number + 1
        if at * linux.PAGE < len(data):
            self._end(start, at, data)
        self._last, self._stop = data[-_EDGE:].tobytes(), start + len(data)

    def _begin(self, start: int, number: int, data: Bytes) -> None:
        if self._start is not None:
            return  # it goes on from the window before
        at = number * linux.PAGE
        before = data[at - _EDGE : at].tobytes() if at else self._last
        if any(before):
            self._start = start + at

    def _end(self, start: int, number: int, data: Bytes) -> None:
        """End the hole before the page `number` of this window, which is not zero."""
        at = number * linux.PAGE
        if self._start is not None and any(data[at : at + _EDGE].tobytes()):
            self.found.append((self._start, start + at))
        self._start = None

    def finish(self) -> list[tuple[int, int]]:
        if self._start is not None:
            self.found.append((self._start, self._stop))
        return self.found


def read_all(
    inventory: VerifyInventory,
    extra: Callable[[str, ListedFile], list[Layer]],
    progress: OnRead | None = None,
    *,
    window_bytes: int = 0,
) -> None:
    """Read all files of `inventory`, and add what is wrong to it.

    Memory is bounded by four windows of `window_bytes`, by default 32 MiB. `extra` returns more
    layers of a file that take its bytes. Raises TransferError for an error that is no damage.
    """
    total = sum(one.size_bytes for one in inventory.files.values())
    largest = window_bytes or _WINDOW
    wrong: dict[str, str] = {}

    def failed(path: str, error: DataMismatchError | TransferError) -> None:
        wrong.setdefault(path, unreadable(error))

    done, check = 0, None
    windows = _windows(inventory, largest)
    reading = read_ahead(
        inventory.location.writer,
        inventory.location.home,
        inventory.sizes,
        windows,
        largest_bytes=largest,
        failed=failed,
    )
    for (path, start, _, _), data in reading:
        if check is None or check.path != path:
            if check is not None:
                check.finish(wrong)
            check = _FileCheck(inventory, path, extra(path, inventory.files[path]))
        check.take(start, data)
        done += len(data)
        if progress is not None:
            progress(done, total)
    if check is not None:
        check.finish(wrong)


def _windows(inventory: VerifyInventory, largest: int) -> Iterator[FileRange]:
    for path, file in inventory.files.items():
        for start in range(0, file.size_bytes, largest):
            yield FileRange(path, start, min(start + largest, file.size_bytes))


class _FileCheck:
    """The checks of one file."""

    def __init__(self, inventory: VerifyInventory, path: str, extra: list[Layer]) -> None:
        self.path = path
        self._inventory, self._file = inventory, inventory.files[path]
        self._wrong: list[tuple[CheckedRange, str]] = []
        self._holes = _Holes()
        self._layers = [
            *extra,
            *(Layer(ranges, RangeCheck, self._compare) for ranges in self._file.layers),
        ]

    def _compare(self, one: CheckedRange, check: RangeCheck) -> None:
        if what := check.difference():
            self._wrong.append((one, what))

    def take(self, start: int, data: Bytes) -> None:
        self._holes.take(start, data)
        for layer in self._layers:
            layer.take(start, data)

    def finish(self, failed: dict[str, str]) -> None:
        if self.path in failed:
            self._inventory.error(self.path, failed[self.path])
            return
        holes = self._holes.finish()
        for one, what in dict.fromkeys(self._wrong):
            zeros = [h for h in holes if h[0] < one.stop and one.start < h[1]]
            if zeros:
                what += f"; bytes [{zeros[0][0]}, {zeros[0][1]}) are zeros: a hole"
            self._inventory.error(self.path, what, one.name)
        if not self._wrong:
            self._check_holes(holes)

    def _check_holes(self, holes: list[tuple[int, int]]) -> None:
        """Add holes where no checksum proves the zeros.

        Zeros that someone saved begin and end at rows of a tensor, as a rule: an unused row of an
        embedding, a bias. A hole begins and ends at pages, so inside of rows.
        """
        proved = sorted(r for layer in self._file.layers for r in layer if not r.head)
        parts = sorted(self._file.parts, key=lambda one: one[1].start)
        starts = [part.start for _, part in parts]
        for start, stop in holes:
            if any(r.start <= start and stop <= r.stop for r in proved):
                continue
            inside = [
                parts[at][0].name
                for edge in (start, stop)
                if (at := bisect_right(starts, edge) - 1) >= 0 and _inside_row(parts[at][1], edge)
            ]
            if inside or not parts:
                name = inside[0] if inside else ""
                what = f"bytes [{start}, {stop}) are whole pages of zeros, inside of a row: a hole"
                self._inventory.error(self.path, what, name)


def _inside_row(part: TensorPart, edge: int) -> bool:
    rows = int(np.prod(part.sizes[:-1], dtype=np.int64)) if part.sizes else 1
    row_bytes = (part.stop - part.start) // max(rows, 1)
    inside = edge < part.stop and row_bytes > 0
    return bool(inside and (edge - part.start) % row_bytes)


_FLOATS: dict[str, tuple[str, int, int]] = {
    "float8_e4m3fn": ("u1", 0x7F, 0x7F),  # without infinities: one NaN (arXiv 2209.05433)
    "float8_e5m2": ("u1", 0x7C, 0x03),
    "float16": ("u2", 0x7C00, 0x03FF),
    "bfloat16": ("u2", 0x7F80, 0x007F),
    "float32": ("u4", 0x7F800000, 0x007FFFFF),
    "complex64": ("u4", 0x7F800000, 0x007FFFFF),
    "float64": ("u8", 0x7FF << 52, (1 << 52) - 1),
    "complex128": ("u8", 0x7FF << 52, (1 << 52) - 1),
}
"""dtype -> numpy's unsigned type, bits that NaN and infinities have, bits that only NaN have."""


class ValueCounts:
    """The counts of all tensors of an inventory."""

    def __init__(self) -> None:
        self.nan: Counter[tuple[str, str]] = Counter()
        """By file and tensor."""
        self.inf: Counter[tuple[str, str]] = Counter()
        self._nonzero: dict[int, bool] = {}  # by tensor, which may have several parts

    def layer(self, path: str, file: ListedFile) -> Layer:
        """Return the layer that counts the values of a file; bytes of two tensors count once."""
        tensors = {tensor.name: tensor for tensor, _ in file.parts}

        def begin(one: CheckedRange) -> _Running:
            return _Running(tensors[one.name].dtype)

        def end(one: CheckedRange, found: _Running) -> None:
            self.note(path, tensors[one.name], found)

        ranges = (CheckedRange(part.start, part.stop, one.name) for one, part in file.in_order())
        return Layer(ranges, begin, end)

    def count(self, path: str, tensor: ListedTensor, data: Bytes) -> None:
        running = _Running(tensor.dtype)
        running.update(data)
        self.note(path, tensor, running)

    def note(self, path: str, tensor: ListedTensor, found: _Running) -> None:
        self.nan[path, tensor.name] += found.nan
        self.inf[path, tensor.name] += found.inf
        if 0 not in tensor.shape:
            known = self._nonzero.get(id(tensor), False)
            self._nonzero[id(tensor)] = known or found.nonzero

    def summary(self, inventory: VerifyInventory) -> dict[str, int]:
        """Return the sums, and add a warning for each tensor with NaN or infinities."""
        for (path, name), nan in sorted(self.nan.items()):
            inf = self.inf[path, name]
            if nan or inf:
                inventory.warn(path, f"has {nan} NaN and {inf} infinite values", name)
        return {
            "nan": self.nan.total(),
            "inf": self.inf.total(),
            "zero_tensors": sum(not one for one in self._nonzero.values()),
        }


class _Running:
    """The counts of one part of a tensor; a value may be in two windows."""

    def __init__(self, dtype: str) -> None:
        self.nan = self.inf = 0
        self.nonzero = False
        self._dtype, self._rest = dtype, b""

    def update(self, data: Bytes) -> None:
        self.nonzero = self.nonzero or bool(data.any())
        if self._dtype not in _FLOATS:
            return
        kind, special, fraction = _FLOATS[self._dtype]
        if self._rest:
            data = np.frombuffer(self._rest + data.tobytes(), dtype=np.uint8)
        whole = len(data) - len(data) % np.dtype(kind).itemsize
        self._rest = data[whole:].tobytes()
        if data.ctypes.data % np.dtype(kind).itemsize:
            data = data[:whole].copy()
        values = data[:whole].view(kind)
        found = values[values & special == special] & fraction
        nan = int(np.count_nonzero(found))
        self.nan += nan
        self.inf += len(found) - nan
