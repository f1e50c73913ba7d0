"""Counts NaN, infinities, and tensors of zeros alone, while files are read."""

from __future__ import annotations

from collections import Counter

import numpy as np

from iobench.verification.inventory import CheckedRange, ListedFile, ListedTensor, VerifyInventory
from iobench.verification.reading import Layer
from iobench.writers.image import Bytes

_FLOATS: dict[str, tuple[str, int, int]] = {
    "float8_e5m2": ("u1", 0x7C, 0x03),
    "float16": ("u2", 0x7C00, 0x03FF),
    "bfloat16": ("u2", 0x7F80, 0x007F),
    "float32": ("u4", 0x7F800000, 0x007FFFFF),
    "complex64": ("u4", 0x7F800000, 0x007FFFFF),
    "float64": ("u8", 0x7FF << 52, (1 << 52) - 1),
    "complex128": ("u8", 0x7FF << 52, (1 << 52) - 1),
}
"""dtype -> numpy's unsigned type, bits of the exponent, bits of the fraction (IEEE 754)."""
_NAN_ONLY = {"float8_e4m3fn": ("u1", 0x7F)}
"""A type without infinities: its one NaN, without the sign (arXiv 2209.05433)."""


class ValueCounts:
    """The counts of all tensors of an inventory."""

    def __init__(self) -> None:
        self.nan: Counter[tuple[str, str]] = Counter()
        """By file and tensor."""
        self.inf: Counter[tuple[str, str]] = Counter()
        self._nonzero: dict[int, bool] = {}  # by tensor, which may have several parts

    def layers(self, path: str, file: ListedFile) -> list[Layer]:
        """Return layers that count the values of a file; those of tied tensors once."""
        left = sorted({part[:3]: tensor.name for tensor, part in file.parts}.items())
        tensors = {tensor.name: tensor for tensor, _ in file.parts}
        layers: list[Layer] = []

        def begin(one: CheckedRange) -> _Running:
            return _Running(tensors[one.name].dtype)

        def end(one: CheckedRange, found: _Running) -> None:
            self.note(path, tensors[one.name], found)

        while left:
            chosen, rest, reached = list[CheckedRange](), [], 0
            for key, name in left:
                if key[1] >= reached:
                    chosen.append(CheckedRange(key[1], key[2], name))
                    reached = key[2]
                else:
                    rest.append((key, name))
            layers.append(Layer(chosen, begin, end))
            left = rest
        return layers

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
        kind = (_FLOATS.get(self._dtype) or _NAN_ONLY.get(self._dtype) or ("",))[0]
        if not kind:
            return
        if self._rest:
            data = np.frombuffer(self._rest + data.tobytes(), dtype=np.uint8)
        whole = len(data) - len(data) % np.dtype(kind).itemsize
        self._rest = data[whole:].tobytes()
        if data.ctypes.data % np.dtype(kind).itemsize:
            data = data[:whole].copy()
        values = data[:whole].view(kind)
        if self._dtype in _NAN_ONLY:
            self.nan += int(np.count_nonzero(values & 0x7F == _NAN_ONLY[self._dtype][1]))
            return
        _, exponent, fraction = _FLOATS[self._dtype]
        special = values[values & exponent == exponent] & fraction
        nan = int(np.count_nonzero(special))
        self.nan += nan
        self.inf += len(special) - nan
