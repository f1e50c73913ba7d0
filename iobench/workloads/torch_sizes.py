"""Sizes of the zip archives that torch.save writes, computed without writing them.

A stream's archive is named "archive", which is the default here. A file's archive has the file's
stem as its name, which changes the size by some bytes per record.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from iobench.formats.torch_zip import zip_bytes
from iobench.workloads.specs import TensorSpec

_HEAD = ((".format_version", 1), (".storage_alignment", 2), ("byteorder", 6))
_VERSION = ("version", 2)
_TAIL = (_VERSION, (".data/serialization_id", 40))

_STORAGE_NAMES = {
    "bool": "BoolStorage",
    "uint8": "ByteStorage",
    "int8": "CharStorage",
    "int16": "ShortStorage",
    "int32": "IntStorage",
    "int64": "LongStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}


def archive_bytes(
    pickle_bytes: int,
    storages: Iterable[int],
    name: str = "archive",
    *,
    before_2_1: bool = False,
) -> int:
    """Return the size of an archive with a `data.pkl` of `pickle_bytes` and the `storages`.

    All sizes are in bytes. The result is exact when `pickle_bytes` is. `before_2_1` is for torch
    before 2.1, which wrote fewer records and sorted the storages by key as text: 0, 1, 10, 11, ...
    """
    data = [(f"data/{index}", size) for index, size in enumerate(storages)]
    records = [("data.pkl", pickle_bytes), *_HEAD, *data, *_TAIL]
    if before_2_1:
        records = [("data.pkl", pickle_bytes), *sorted(data), _VERSION]
    return zip_bytes(name, records)


def single_tensor_archive_bytes(tensor: TensorSpec) -> int:
    """Return the exact size of `torch.save(tensor, stream)` for one contiguous tensor, in bytes.

    DCP writes each of its tensors like this. The overhead is 1577 bytes when the tensor's size is a
    multiple of 64; otherwise the padding makes it smaller. It is an estimate for a dtype without a
    legacy storage class: torch pickles float8 and unsigned integers in another way.
    """
    if tensor.dtype not in _STORAGE_NAMES:
        return state_dict_archive_bytes([tensor])
    return _single_tensor_archive_bytes(tensor.dtype, tensor.shape)


@lru_cache(maxsize=4096)  # a checkpoint has thousands of tensors of a dozen shapes
def _single_tensor_archive_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    tensor, pickle = TensorSpec(name="", dtype=dtype, shape=shape), _PickleSize()
    pickle.size = 3  # protocol, end
    pickle.tensor(tensor, "0")
    return archive_bytes(pickle.size, [tensor.size_bytes])


def state_dict_archive_bytes(tensors: Sequence[TensorSpec]) -> int:
    """Estimate the size of `torch.save` of a nested dict with one storage per tensor, in bytes.

    The zip records are exact, the pickle is an estimate. It leaves out what a framework pickles in
    addition to tensors, such as arguments and parameter groups: some bytes to about 1 MB.
    """
    keys = {tensor.name.rpartition("/")[2] for tensor in tensors}
    pickled = _TENSOR_PICKLE * len(tensors) + sum(_KEY_PICKLE + len(key) for key in keys)
    return archive_bytes(_DICT_PICKLE + pickled, (t.size_bytes for t in tensors))


def dict_pickle_bytes(tensors: Sequence[TensorSpec]) -> int:
    """Return the exact size of `data.pkl` for a flat dict of contiguous CPU tensors.

    Each tensor has its own storage. The format is pickle protocol 2, as C pickle writes it: an
    object is pickled once and then referred to by its number in the memo, which takes 2 bytes, or 5
    from number 256 on.
    """
    pickle = _PickleSize()
    pickle.size += 3  # protocol, empty dict
    pickle.put()
    for index, tensor in enumerate(tensors):
        pickle.text(tensor.name)
        pickle.tensor(tensor, str(index))
    batches = len(tensors) // 1000 + 1  # a mark and a SETITEMS each; one item needs no mark
    return pickle.size + (2 * batches if len(tensors) > 1 else len(tensors)) + 1


class _PickleSize:
    """Counts the bytes of a pickle."""

    def __init__(self) -> None:
        self.size = 0
        self._memo = 0
        self._shared: set[str] = set()

    def put(self) -> None:
        """Count the memo entry of the last object."""
        self.size += 2 if self._memo < 256 else 5
        self._memo += 1

    def text(self, text: str) -> None:
        self.size += 5 + len(text.encode())
        self.put()

    def shared(self, key: str, size: int) -> None:
        """Count an object of `size` bytes that later occurrences refer to."""
        if key in self._shared:
            self.size += 2
            return
        self._shared.add(key)
        self.size += size
        self.put()

    def integers(self, values: Sequence[int]) -> None:
        """Count a tuple of ints; an empty one is not in the memo."""
        self.size += sum(map(_int_bytes, values)) + (2 if len(values) > 3 else 1)
        if values:
            self.put()

    def tensor(self, tensor: TensorSpec, key: str) -> None:
        """Count the call of torch._utils._rebuild_tensor_v2 with its arguments."""
        storage = _STORAGE_NAMES[tensor.dtype]
        self.shared("rebuild", len("ctorch._utils\n_rebuild_tensor_v2\n"))
        self.size += 2  # marks of the arguments and of the storage's persistent id
        self.shared("storage", 5 + len("storage"))
        self.shared(storage, len(f"ctorch\n{storage}\n"))
        self.text(key)
        self.shared("cpu", 5 + len("cpu"))
        self.size += _int_bytes(tensor.elements) + 1
        self.put()
        self.size += 1 + 2  # BINPERSID, storage offset 0
        self.integers(tensor.shape)
        self.integers(_strides(tensor.shape))
        self.size += 1  # requires_grad
        self.shared("hooks", len("ccollections\nOrderedDict\n"))
        self.size += 2  # empty tuple, REDUCE
        self.put()
        self.size += 1  # tuple of the arguments
        self.put()
        self.size += 1  # REDUCE
        self.put()


def _strides(shape: Sequence[int]) -> list[int]:
    strides = [1]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * max(length, 1))
    return strides[::-1] if shape else []


_TENSOR_PICKLE, _KEY_PICKLE, _DICT_PICKLE = 75, 10, 100  # averages of torch 2.13's own pickles


def _int_bytes(value: int) -> int:
    if value < 2**8:
        return 2
    if value < 2**16:
        return 3
    if value < 2**31:
        return 5
    return 2 + value.bit_length() // 8 + 1
