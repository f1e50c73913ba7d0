"""TensorLayouts: dtypes, shapes and strides of many tensors, compared quickly with those of others.

FileLayout: the text of a file and the parts in it, filled with addresses for each save.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from iobench.formats.many_parts import Numbers, ScatteredImage
from iobench.formats.tensors import dtype_name, resolved
from iobench.writers.image import Bytes

_PLAIN = {torch.Tensor, torch.nn.Parameter}


class Located(NamedTuple):
    """Addresses of tensors and of their storages, in the order of the tensors.

    `owners` keep the memory alive, also when a tensor object gets other memory (`.data =`).
    """

    addresses: Numbers
    storages: Numbers
    owners: list[torch.UntypedStorage]

    @classmethod
    def nowhere(cls) -> Located:
        return cls(numbers([]), numbers([]), [])


class TensorLayout(NamedTuple):
    """What many tensors have in common.

    `size_bytes` is that of their elements, `reach_bytes` from the first to the last one.
    """

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    device: torch.device
    dtype_name: str
    size_bytes: int
    reach_bytes: int
    contiguous: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorLayout:
        return cls(
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.device,
            dtype_name(tensor.dtype),
            tensor.nbytes,
            reach_bytes(tensor),
            tensor.is_contiguous(),
        )


class TensorLayouts:
    """What must be equal so that other tensors, in the same order, make a file of the same layout.

    `each` has the layout of each tensor, and `reaches` the bytes from its first to its last
    element; `contiguous` is true for a tensor that is so. `on_cpu` is whether all are in host
    memory. It keeps no tensor alive.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take strided tensors without lazy conjugation or negation."""
        # No call of Python for each tensor; few layouts in many tensors, so few objects.
        dtypes, shapes = map(_dtype_of, tensors), map(_shape_of, tensors)
        strides, self.on_cpu = map(torch.Tensor.stride, tensors), all(map(_is_cpu, tensors))
        devices = [_CPU] * len(tensors) if self.on_cpu else map(_device_of, tensors)
        keys = list(zip(dtypes, shapes, strides, devices, strict=True))
        examples = dict(zip(keys, tensors, strict=True))
        layouts = {key: TensorLayout.of(tensor) for key, tensor in examples.items()}
        self.each = list(map(layouts.__getitem__, keys))
        self.reaches = numbers(map(attrgetter("reach_bytes"), self.each))
        self.contiguous = np.fromiter(map(attrgetter("contiguous"), self.each), dtype=np.bool_)
        self._dtypes = list(map(attrgetter("dtype"), self.each))
        self._shapes = list(map(attrgetter("shape"), self.each))
        self._strides = list(map(attrgetter("stride"), self.each))
        self._devices = [] if self.on_cpu else list(map(attrgetter("device"), self.each))
        self._complex = [at for at, dtype in enumerate(self._dtypes) if dtype.is_complex]

    def locate(self, tensors: list[torch.Tensor]) -> Located | None:
        """Return where `tensors` of these layouts are; None if one of them differs.

        A tensor with lazy conjugation or negation is replaced by its values. Also returns None when
        a storage does not hold its tensor, like that of a parameter that FSDP has resharded.
        """
        if len(tensors) != len(self.each):
            return None
        try:
            for number in self._lazy(tensors):
                tensors[number] = resolved(tensors[number])
            # One call of Python for all tensors and one question, also below: a third less time.
            same = (
                list(map(_dtype_of, tensors)) == self._dtypes
                and list(map(_shape_of, tensors)) == self._shapes
                and list(map(torch.Tensor.stride, tensors)) == self._strides
                and (
                    all(map(_is_cpu, tensors))
                    if self.on_cpu
                    else list(map(_device_of, tensors)) == self._devices
                )
            )
            return self.locate_same(tensors) if same else None
        except RuntimeError:
            # A nested tensor has no shape, others have no strides or no storage. A question for
            # the layout of each would take 0.15 us per tensor.
            return None

    def held(
        self, tensors: Sequence[torch.Tensor], count: int
    ) -> tuple[list[torch.Tensor], Located]:
        """Return the tensors for a copy while the trainer goes on, and where they are.

        It may give tensor objects other memory, so the first `count` are detached: others on the
        same memory. It may change numpy arrays at once, so the rest, which are arrays, are copied.
        """
        kept = [tensor.detach() for tensor in tensors[:count]]
        kept += [array.clone() for array in tensors[count:]]
        located = self.locate_same(kept)
        assert located is not None  # the same layouts
        return kept, located

    def _lazy(self, tensors: Sequence[torch.Tensor]) -> Iterator[int]:
        """Yield the numbers of the tensors with lazy conjugation or negation.

        `locate` finds another dtype of the tensors that are complex in another place.
        """
        yield from itertools.compress(itertools.count(), map(torch.Tensor.is_neg, tensors))
        yield from (number for number in self._complex if tensors[number].is_conj())

    def locate_same(self, tensors: Sequence[torch.Tensor]) -> Located | None:
        """Return where `tensors` are whose layouts are known to be these.

        None when a storage does not hold its tensor.
        """
        return located(tensors, self.reaches)


def located(tensors: Sequence[torch.Tensor], reaches: Numbers) -> Located | None:
    """Return where `tensors` are; None when a storage does not hold the `reaches` of its tensor."""
    owners = list(map(_storage, tensors))
    addresses, storages = numbers(map(_address, tensors)), numbers(map(_begin, owners))
    ends = storages + numbers(map(_nbytes, owners)) - reaches
    outside = (addresses < storages) | (addresses > ends)
    if (outside & (reaches > 0)).any():
        return None
    return Located(addresses, storages, owners)


def located_dense(tensors: Sequence[torch.Tensor]) -> Located | None:
    """Return where `tensors` are; None unless each is its plain bytes in host memory.

    Others are not contiguous, sparse or nested, lazily conjugated or negated, on a device, of a
    subclass of Tensor, or on a storage that does not hold them.
    """
    if not (all_plain(tensors) and are_strided(tensors) and all(map(_is_cpu, tensors))):
        return None
    lazy = map(torch.Tensor.is_neg, tensors), map(torch.Tensor.is_conj, tensors)
    if not all(map(torch.Tensor.is_contiguous, tensors)) or any(map(any, lazy)):
        return None
    return located(tensors, numbers(map(_tensor_bytes, tensors)))


_CPU = torch.device("cpu")
_storage, _address = torch.Tensor.untyped_storage, torch.Tensor.data_ptr
_begin, _nbytes = torch.UntypedStorage.data_ptr, torch.UntypedStorage.nbytes
_layout_of, _is_nested, _is_cpu = map(attrgetter, ("layout", "is_nested", "is_cpu"))
_tensor_bytes = attrgetter("nbytes")
_dtype_of, _shape_of, _device_of = map(attrgetter, ("dtype", "shape", "device"))


def are_strided(tensors: Collection[torch.Tensor]) -> bool:
    """Whether all tensors have a shape and strides: none is sparse or nested."""
    return set(map(_layout_of, tensors)) <= {torch.strided} and not any(map(_is_nested, tensors))


class FileLayout:
    """The text of a file, and the sizes of the parts that are in it: 1 byte or more."""

    def __init__(
        self, text: bytes, sizes: Sequence[int], cuts: Sequence[int] | None = None
    ) -> None:
        """Part number i follows the first `cuts[i]` bytes of `text`; by default all of it."""
        self.text = np.frombuffer(text, dtype=np.uint8)
        stops = numbers([*([len(text)] * len(sizes) if cuts is None else cuts), len(text)])
        self._cuts = np.concatenate([[0], stops[:-1]])
        lengths = np.empty(2 * len(sizes) + 1, dtype=np.int64)
        lengths[::2], lengths[1::2] = stops - self._cuts, sizes
        self._filled = lengths > 0
        self.lengths = lengths[self._filled]
        self.starts: list[int] = (np.cumsum(self.lengths) - self.lengths).tolist()

    def image(
        self, path: str, addresses: Numbers, apart: Mapping[int, Bytes], owners: object
    ) -> ScatteredImage:
        """Return the image of a file with bytes, whose parts are at `addresses`, to be copied.

        A part whose number is in `apart` is there. `owners` keeps the other memory alive.
        """
        places = np.empty(len(self._filled), dtype=np.int64)
        places[::2], places[1::2] = self._cuts + self.text.ctypes.data, addresses
        for number, memory in apart.items():
            places[2 * number + 1] = memory.ctypes.data
        return ScatteredImage(
            path,
            starts=self.starts,
            addresses=places[self._filled],
            lengths=self.lengths,
            owners=(self.text, apart, owners),
        )


def numbers(values: Iterable[int]) -> Numbers:
    return np.fromiter(values, dtype=np.int64)


def all_plain(values: Collection[Any]) -> bool:
    """Whether all are tensors with their own memory: no subclass of Tensor, no lazy parameter."""
    kinds = set(map(type, values))
    return kinds <= _PLAIN or (
        all(kind is torch.Tensor or issubclass(kind, torch.nn.Parameter) for kind in kinds)
        and all(not is_lazy(value) and type(value.data) is torch.Tensor for value in values)
    )


def reach_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first to the last element of a tensor."""
    if tensor.is_contiguous():
        return tensor.nbytes
    if not tensor.numel():
        return 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
