"""The work of `safe_open` of `iobench.safetensors` and `iobench exec`: a file by a writer.

Calls that a writer cannot make exactly like safetensors raise Unsupported when the file is opened.
A read that fails later is made by the stock class.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import EllipsisType, NoneType
from typing import Any, NoReturn, Self

import numpy as np
import safetensors
import torch
from safetensors import SafetensorError

from iobench.environment.memory import available_bytes
from iobench.formats.safetensors import SafetensorsFile, TensorInFile, metadata_of
from iobench.formats.safetensors_header import DTYPES
from iobench.formats.tensor_slices import GAP_BYTES
from iobench.formats.tensors import dtype_name
from iobench.integrations.replacing import bypass
from iobench.integrations.stock_path import StockPath, Unsupported, check_stock_can, path_of
from iobench.writers.base import Writer
from iobench.writers.s3_store.target import is_s3
from iobench.writers.transfer import Transfer

NAME = "safetensors.safe_open"
_TORCH = ("pt", "torch", "pytorch")
_PLAIN = (int, np.integer, slice, EllipsisType, NoneType)
_PACKED = "float4_e2m1fn_x2"
"""Its shape in the file is not that of torch."""

NoteStock = Callable[[Exception], None]
NoteRead = Callable[[Transfer], None]


def _device(device: Any) -> torch.device:
    """Return the device of a safe_open's argument. Raises Unsupported for what only stock knows."""
    if device is None or device == "cpu":
        return torch.device("cpu")
    number = type(device) is int and device >= 0
    named = type(device) is str and device.partition(":")[0] == "cuda"
    if not (number or named) or not torch.cuda.is_available():
        raise Unsupported(f"device {device!r}")
    return torch.device("cuda", device) if number else torch.device(device)


def check_memory(size_bytes: int) -> None:
    """Raise Unsupported when the free memory cannot hold so much of a file in each local process.

    A mapped file takes memory only when it is accessed, and processes share its pages. We read
    into private memory.
    """
    available = available_bytes()
    readers = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    if available is not None and size_bytes * readers > available:
        raise Unsupported("the file is larger than the free memory; stock maps it")


class OpenFile:
    """What `safe_open` returns: the methods and the errors of the stock class.

    Each call reads anew and returns memory of its own, which is contiguous; tensors of the stock
    class share the mapped file. Slices work after it is closed.
    """

    def __init__(
        self,
        writer: Writer,
        filename: Any,
        framework: Any,
        device: Any = "cpu",
        *,
        backend: str = "mmap",
        on_stock: NoteStock,
        on_read: NoteRead = lambda _: None,
    ) -> None:
        """Open the file. Raises Unsupported, and every other error unchanged.

        `on_stock` gets the reason of each read that the stock class makes, and `on_read` the
        Transfer of each other one.
        """
        if framework not in _TORCH:
            raise Unsupported(f"framework {framework!r}, not torch")
        if backend not in ("mmap", "pread"):
            raise Unsupported(f"backend {backend!r}, neither mmap nor pread")
        target, on = StockPath.of_stored(path_of(filename), writer), _device(device)

        def stock() -> Any:
            with bypass():
                return safetensors.safe_open(filename, framework, device, backend=backend)

        with bypass():
            self._file = SafetensorsFile(
                target.name, target.directory, writer, device=on, on_read=on_read
            )
        self._stock, self._on_stock, self._closed = stock, on_stock, False

    def _open(self) -> SafetensorsFile:
        if self._closed:
            raise SafetensorError("File is closed")
        return self._file

    def _tensor(self, name: Any) -> TensorInFile:
        """Return a tensor by its name. Raises the errors of the stock class."""
        file = self._open()
        if not isinstance(name, str):
            kind = type(name).__name__
            raise TypeError(f"argument 'name': '{kind}' object is not an instance of 'str'")
        found = file.tensors.get(name)
        if found is None:
            raise SafetensorError(f"File does not contain tensor {name}")
        return found

    def _read(self, name: str, view: torch.Tensor, stock: Callable[[Any], Any]) -> Any:
        """Return a slice of a tensor; after an error what `stock` returns from the stock class."""
        file = self._file
        try:
            if view.nbytes >= GAP_BYTES and file.device.type == "cpu" and not is_s3(file.file):
                check_memory(view.nbytes)
            return file.read(file.tensors[name], view)
        except Exception as why:  # noqa: BLE001 -- the stock class reads it, or raises its own error
            check_stock_can("read", NAME, file.file, why)
            file.check_unchanged()
            self._on_stock(why)
        return stock(self._stock())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True

    def keys(self) -> list[str]:
        """Return the names of the tensors, sorted."""
        return sorted(self._open().tensors)

    def offset_keys(self) -> list[str]:
        """Return the names of the tensors in the order of the file."""
        return list(self._open().tensors)

    def metadata(self) -> dict[str, str] | None:
        """Return the metadata; None without any."""
        return metadata_of(self._open().header)

    def get_tensor(self, name: str) -> Any:
        view = self._tensor(name).slice()
        return self._read(name, view, lambda file: file.get_tensor(name))

    def get_tensors(self) -> dict[str, Any]:
        return {name: self.get_tensor(name) for name in self.offset_keys()}

    def get_slice(self, name: str) -> SafeSlice:
        """Return a tensor that is read by the ranges that are asked for with `[...]`."""
        return SafeSlice(self, name, self._tensor(name))

    def __reduce__(self) -> NoReturn:
        raise TypeError("cannot pickle 'safe_open' object")


class SafeSlice:
    """What `get_slice` returns."""

    def __init__(self, file: OpenFile, name: str, tensor: TensorInFile) -> None:
        self._file, self._name, self._tensor = file, name, tensor
        self._packed = dtype_name(tensor.kind.dtype) == _PACKED

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor, in the file."""
        shape = list(self._tensor.kind.shape)
        return [*shape[:-1], 2 * shape[-1]] if shape and self._packed else shape

    def get_dtype(self) -> str:
        """Return the dtype's code in the file, such as BF16."""
        return DTYPES[dtype_name(self._tensor.kind.dtype)][0]

    def __getitem__(self, index: Any) -> Any:
        """Return a slice like torch. Other indices than integers and slices read all of it.

        So do several ellipses: what torch makes of them depends on the device.
        """
        if self._packed:  # the stock class refuses it, or knows what to do
            return self._file._stock().get_slice(self._name)[index]
        items = index if isinstance(index, tuple) else (index,)
        plain = all(isinstance(one, _PLAIN) and not isinstance(one, bool) for one in items)
        if not plain or sum(one is Ellipsis for one in items) > 1:
            return self[...][index]
        return self._file._read(
            self._name,
            self._tensor.slice(index),
            lambda file: file.get_slice(self._name)[index],
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError("cannot pickle 'PySafeSlice' object")
