"""States: the tensors of a replay's files, as windows of the pool that are made when needed."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from iobench.bench.data.pool import RandomPool, Window, Windows
from iobench.formats.safetensors_header import file_order
from iobench.formats.tensors import tensor_from_bytes, torch_dtype
from iobench.workloads.specs import FileSpec, TensorSpec

TensorDict = dict[str, torch.Tensor]
_AHEAD = 4096
"""Files whose tensors exist before a save; with one tensor in each they take 3 MiB."""


class WindowPlacement:
    """The files of one rank, their tensors in payload order, and the window of each tensor.

    Numbers only: there may be 100,000 files. The windows never change, so a save and its restore
    use the same ones.
    """

    def __init__(self, files: Sequence[FileSpec], pool_bytes: int) -> None:
        windows = Windows(pool_bytes)
        self._first = array("Q", [0])  # the number of each file's first tensor
        self._starts, self._stops, self._laps = array("Q"), array("Q"), array("I")
        self.files = tuple(map(in_payload_order, files))
        for spec in self.files:
            for tensor in spec.tensors:
                start, stop, lap = windows.take(tensor.size_bytes)
                self._starts.append(start)
                self._stops.append(stop)
                self._laps.append(lap)
            self._first.append(len(self._starts))

    @property
    def count(self) -> int:
        """The number of tensors."""
        return len(self._starts)

    def size(self, tensor: int) -> int:
        """Return the bytes of one tensor by its number."""
        return self._stops[tensor] - self._starts[tensor]

    def tensors(self, file: int) -> range:
        """Return the numbers of a file's tensors, which count through all files."""
        return range(self._first[file], self._first[file + 1])

    def window(self, tensor: int) -> Window:
        """Return the window of one tensor by its number."""
        return Window(self._starts[tensor], self._stops[tensor], self._laps[tensor])


class States:
    """Each file's tensors by name, in payload order: whole, or the slices of one rank.

    The tensors of the first files are made before the clock of a save starts. Those of the others
    are made when their file is saved: 3 us of the 100 us and more that a file takes.
    """

    def __init__(
        self, placement: WindowPlacement, pool: RandomPool, part: tuple[int, int] | None = None
    ) -> None:
        """`part` is a rank, and the number of ranks of its tensor parallelism; None: no slices."""
        self._placement, self._pool, self._part = placement, pool, part
        self._ahead: list[TensorDict] = []

    def cut(self, rank: int, ranks: int) -> States:
        """Return what `rank` of tensor parallel `ranks` loads: slices of the safetensors files."""
        return States(self._placement, self._pool, (rank, ranks))

    def slices(self, file: int) -> dict[str, tuple[slice, ...]]:
        """Return the slice of each tensor of a file."""
        specs, first = self._placement.files[file].tensors, self._placement.tensors(file).start
        some = (specs[number - first] for number in self.numbers(file))
        return {spec.name: self._slice(spec) for spec in some}

    def _slice(self, spec: TensorSpec) -> tuple[slice, ...]:
        """Return the slice of a tensor; () for all of it."""
        if self._part is None or spec.split is None:
            return ()
        (rank, ranks), length = self._part, spec.shape[spec.split]
        own = slice(rank * length // ranks, (rank + 1) * length // ranks)
        return (*(slice(None),) * spec.split, own)

    def make_ahead(self) -> None:
        """Make the tensors of the first files."""
        self._ahead += [self._made(n) for n in range(len(self._ahead), min(len(self), _AHEAD))]

    def release(self) -> None:
        """Release the tensors that `make_ahead` made."""
        self._ahead.clear()

    def numbers(self, file: int) -> range:
        """Return the numbers of the tensors of one file; none where its format has no slices."""
        if self._part is not None and self._placement.files[file].format != "safetensors":
            return range(0)
        return self._placement.tensors(file)

    def __len__(self) -> int:
        return len(self._placement.files)

    def __getitem__(self, file: int) -> TensorDict:
        return self._ahead[file] if file < len(self._ahead) else self._made(file)

    def __iter__(self) -> Iterator[TensorDict]:
        return map(self.__getitem__, range(len(self)))

    def _made(self, file: int) -> TensorDict:
        specs, first = self._placement.files[file].tensors, self._placement.tensors(file).start
        found = {}
        for number in self.numbers(file):
            start, stop, _ = self._placement.window(number)
            spec = specs[number - first]
            memory = self._pool.memory[start:stop]
            made = tensor_from_bytes(memory, torch_dtype(spec.dtype), spec.shape)
            found[spec.name] = made[cut] if (cut := self._slice(spec)) else made
        return found


def in_payload_order(spec: FileSpec) -> FileSpec:
    """Return `spec` with its tensors in the order of their bytes in the file.

    A DCP file gets one more "tensor" for the archives' headers that are not tensors.
    """
    by_name = {tensor.name: tensor for tensor in spec.tensors}
    if spec.format == "safetensors":
        tensors = sorted(by_name.values(), key=lambda one: file_order((one.name, one.dtype, ())))
    elif spec.format == "torch":
        tensors = [by_name[name] for _, name in flat(nested({name: name for name in by_name}))]
    else:
        tensors = list(spec.tensors)
        if rest := _headers(spec):
            tensors.append(TensorSpec(name="archive headers", dtype="uint8", shape=(rest,)))
    same = tensors == list(spec.tensors)
    return spec if same else replace(spec, tensors=tuple(tensors))


def payload_sizes(spec: FileSpec) -> list[int]:
    """Return the bytes of each tensor of `in_payload_order(spec)`, in any order."""
    rest = _headers(spec)
    return [*(tensor.size_bytes for tensor in spec.tensors), *([rest] if rest else [])]


def _headers(spec: FileSpec) -> int:
    """Return the bytes of a DCP file that are not tensors; 0 where a format knows its header."""
    if spec.format in ("safetensors", "torch"):
        return 0
    return max(0, spec.size_bytes - spec.payload_bytes)


def nested(named: Mapping[str, Any]) -> dict[Any, Any]:
    """Return nested dicts for names such as `state/0/exp_avg`; digits become int keys."""
    root: dict[Any, Any] = {}
    for name, value in named.items():
        *parents, leaf = (int(p) if p.isdigit() else p for p in name.split("/"))
        inner = root
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[leaf] = value
    return root


def flat(given: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested dicts under flat names: the inverse of `nested`."""
    for key, value in given.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value
