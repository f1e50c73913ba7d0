"""SafetensorsFile: an open safetensors file, of which tensors and slices are read one by one."""

from __future__ import annotations

import copy
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from iobench.errors import DataMismatchError
from iobench.formats import safetensors
from iobench.formats.many_parts import WindowImage
from iobench.formats.safetensors import Kind, TensorRun, runs_of
from iobench.formats.tensor_slices import CutImage, CutPart, room_for, rows_of, spans
from iobench.formats.tensors import allocate_on, tensor_from_bytes
from iobench.writers.base import Writer
from iobench.writers.image import Bytes, FileImage, Ranges
from iobench.writers.transfer import Transfer

_KEPT_RUNS = 16


class TensorInFile(NamedTuple):
    """A tensor of a file: where it begins, what it is, and the tensors that it is read with."""

    start: int
    kind: Kind
    run: TensorRun

    def slice(self, index: Any = ()) -> torch.Tensor:
        """Return a slice as a view of a tensor without memory. Raises what torch raises."""
        whole = torch.empty(self.kind.shape, dtype=self.kind.dtype, device="meta")
        return whole[index]

    def room(self, view: torch.Tensor) -> torch.Tensor:
        """Return new memory for the slice `view` on the CPU; a read of rows needs no copy."""
        start = self.start + _offset(view) if view.is_contiguous() else 0
        return tensor_from_bytes(room_for(start, start + view.nbytes), view.dtype, view.shape)

    def cuts(self, view: torch.Tensor, values: torch.Tensor) -> list[CutPart]:
        """Return what to read for the slice `view` into its memory `values`."""
        found = spans(view)
        rows = rows_of(values, found)
        return [CutPart(self.start, span, row) for span, row in zip(found, rows, strict=True)]


class SafetensorsFile:
    """A safetensors file by its header, of which slices are read as they are asked for.

    A large tensor is read alone, by the ranges that a slice needs (see `spans`). Neighbours of up
    to 256 KiB together are read at once, and the last 16 of these runs are kept in memory for the
    next call. No file stays open; each read compares the file's identity, so that no byte comes
    from another file that got its name. Thread-safe. A forked child may use it.
    """

    def __init__(
        self,
        path: str,
        target: str | Path,
        writer: Writer,
        *,
        device: str | torch.device = "cpu",
        on_read: Callable[[Transfer], None] = lambda _: None,
    ) -> None:
        """Read the header of `target/path`. `on_read` gets the Transfer of each later read.

        Raises DataMismatchError for a damaged file, UsageError for a device or a dtype that this
        torch lacks, and TransferError.
        """
        self.path, self._target, self._writer = path, target, writer
        self._allocate, self.device = allocate_on(device), torch.device(device)
        self._on_read, self._pid = on_read, os.getpid()
        self.file = os.path.join(target, path)
        self._found = self._identity()
        self.header, self.size_bytes = safetensors.read_header(path, target, writer)
        begin = 8 + len(self.header)
        runs = runs_of(self.file, self.header, self.size_bytes - begin, one_by_one=False)
        self.tensors = {
            name: TensorInFile(begin + at, kind, run)
            for run in runs
            for at, _, name, kind in run.entries
        }
        """The tensors by name, in the order of the file."""
        self._data_start = begin
        self._runs: OrderedDict[int, Bytes] = OrderedDict()

    def _identity(self) -> tuple[int, ...] | None:
        if "file" not in self._writer.schemes:
            return None
        found = os.stat(self.file)
        return found.st_dev, found.st_ino, found.st_size

    def check_unchanged(self) -> None:
        """Raise DataMismatchError if another file has this name now, or OSError if none has."""
        if self._identity() != self._found:
            raise DataMismatchError(f"{self.file}: was changed while it was open; open it again")

    def read(self, tensor: TensorInFile, view: torch.Tensor) -> torch.Tensor:
        """Return a slice of `tensor`, which `TensorInFile.slice` described, in new memory.

        It is contiguous, on the device. Raises DataMismatchError for a file that was changed, and
        TransferError.
        """
        alone = len(tensor.run.entries) == 1
        if alone and self._allocate is not None and view.is_contiguous() and view.numel():
            start = tensor.start + _offset(view)
            memory = self._allocate(view.nbytes)
            image = WindowImage(self.path, self.size_bytes, start, memory)
            self._read(image, [(start, start + view.nbytes)])
            return tensor_from_bytes(memory, view.dtype, view.shape)
        values = tensor.room(view)
        cuts = tensor.cuts(view, values)
        if cuts and alone:
            slices = CutImage(self.path, self.size_bytes, cuts)
            self._read(slices, slices.ranges)
        elif cuts:
            data, begin = self._run(tensor.run)
            for cut in cuts:
                cut.take(data, begin)
        return values.to(self.device)

    def _run(self, run: TensorRun) -> tuple[Bytes, int]:
        """Return the bytes of a run of small tensors, and where they begin in the file."""
        begin = self._data_start + run.begin
        data = self._runs.pop(begin, None)
        if data is None:
            data = room_for(begin, begin + run.end - run.begin)
            image = WindowImage(self.path, self.size_bytes, begin, data)
            self._read(image, [(begin, begin + len(data))])
        self._runs[begin] = data
        if len(self._runs) > _KEPT_RUNS:
            self._runs.popitem(last=False)
        return data, begin

    def _read(self, image: FileImage, ranges: Ranges) -> None:
        if os.getpid() != self._pid:  # a child must not use the rings and threads of its parent
            self._writer, self._pid = copy.copy(self._writer), os.getpid()
        moved = self._writer.read_ranges(image, self._target, ranges)
        self.check_unchanged()
        self._on_read(moved)


def _offset(view: torch.Tensor) -> int:
    """Return at which byte of its tensor a slice begins."""
    return int(view.storage_offset()) * view.itemsize
