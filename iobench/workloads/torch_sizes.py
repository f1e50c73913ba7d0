"""Sizes of the zip archives that torch.save writes, computed without writing them.

A stream's archive is named "archive". A file's archive has the file's stem as its name, which
changes the size by some bytes per record.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from iobench.formats.torch_zip import zip_bytes
from iobench.workloads.specs import TensorSpec

_HEAD = ((".format_version", 1), (".storage_alignment", 2), ("byteorder", 6))
_TAIL = (("version", 2), (".data/serialization_id", 40))

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


def archive_bytes(pickle_bytes: int, storages: Iterable[int]) -> int:
    """Return the size of a stream's archive with a `data.pkl` of `pickle_bytes` and the `storages`.

    All sizes are in bytes. The result is exact when `pickle_bytes` is.
    """
    data = ((f"data/{index}", size) for index, size in enumerate(storages))
    return zip_bytes("archive", [("data.pkl", pickle_bytes), *_HEAD, *data, *_TAIL])


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
    tensor = TensorSpec(name="", dtype=dtype, shape=shape)
    pickled = _ONE_PICKLE + len(_STORAGE_NAMES[dtype]) + _int_bytes(tensor.elements)
    pickled += _tuple_bytes(shape) + _tuple_bytes(_strides(shape))
    return archive_bytes(pickled, [tensor.size_bytes])


def state_dict_archive_bytes(tensors: Sequence[TensorSpec]) -> int:
    """Estimate the size of `torch.save` of a nested dict with one storage per tensor, in bytes.

    The zip records are exact, the pickle is an estimate. It leaves out what a framework pickles in
    addition to tensors, such as arguments and parameter groups: some bytes to about 1 MB.
    """
    keys = {tensor.name.rpartition("/")[2] for tensor in tensors}
    pickled = _TENSOR_PICKLE * len(tensors) + sum(_KEY_PICKLE + len(key) for key in keys)
    return archive_bytes(_DICT_PICKLE + pickled, (t.size_bytes for t in tensors))


def _strides(shape: Sequence[int]) -> list[int]:
    strides = [1]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * max(length, 1))
    return strides[::-1] if shape else []


_TENSOR_PICKLE, _KEY_PICKLE, _DICT_PICKLE = 75, 10, 100  # averages of torch 2.13's own pickles
_ONE_PICKLE = 126  # of one tensor, besides the name of its storage class and the numbers


def _tuple_bytes(values: Sequence[int]) -> int:
    """Return the bytes of a tuple in a pickle; an empty one is not in the memo."""
    return sum(map(_int_bytes, values)) + (2 if len(values) > 3 else 1) + (2 if values else 0)


def _int_bytes(value: int) -> int:
    if value < 2**8:
        return 2
    if value < 2**16:
        return 3
    if value < 2**31:
        return 5
    return 2 + value.bit_length() // 8 + 1
