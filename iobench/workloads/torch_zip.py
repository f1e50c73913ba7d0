"""The size of the zip archives that torch.save writes, without writing them.

Emulates PyTorchStreamWriter of torch >= 2.6 (caffe2/serialize/inline_container.cc): stored records,
each payload padded to a multiple of 64 in the file, a data descriptor behind each, the zip64 end
records always. Saved to a stream the archive is called "archive", which is assumed here; saved to
a path it takes the file's stem, which moves the size by a few bytes per record.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from math import prod

from iobench.workloads.specs import TensorSpec

__all__ = ["archive_bytes", "single_tensor_archive_bytes", "state_dict_archive_bytes"]

_ALIGNMENT = 64
_LOCAL_HEADER, _CENTRAL_HEADER = 30, 46
_END_RECORDS = 56 + 20 + 22  # zip64 end of central directory, its locator, end of central directory
_LIMIT = 2**32 - 1  # from here on a size or an offset needs a zip64 field

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


def archive_bytes(pickle_bytes: int, storages: Iterable[int], name: str = "archive") -> int:
    """Size of an archive with a `data.pkl` of `pickle_bytes` and one record per storage, in bytes.

    Exact when `pickle_bytes` is.
    """
    head = [
        ("data.pkl", pickle_bytes),
        (".format_version", 1),
        (".storage_alignment", 2),
        ("byteorder", 6),
    ]
    data = ((f"data/{index}", size) for index, size in enumerate(storages))
    tail = [("version", 2), (".data/serialization_id", 40)]
    cursor = directory = 0
    for record, size in chain(head, data, tail):
        name_bytes = len(name) + 1 + len(record)
        large, far = size >= _LIMIT, cursor >= _LIMIT
        start = cursor + _LOCAL_HEADER + name_bytes + 4
        start += 4 * (large or far) + 16 * large + 8 * far
        start += -start % _ALIGNMENT
        directory += _CENTRAL_HEADER + name_bytes
        directory += 4 * (large or far) + 16 * large + 8 * far
        descriptor = (24 if large or far else 16) if size else 0
        cursor = start + size + descriptor
    return cursor + directory + _END_RECORDS


def single_tensor_archive_bytes(tensor: TensorSpec) -> int:
    """Size of `torch.save(tensor, stream)` for one contiguous tensor, in bytes; exact.

    DCP writes each of its tensors so. The overhead is 1577 bytes, less what the padding to 64 bytes
    saves when the tensor's size is no multiple of 64. Raises KeyError for a dtype without a legacy
    storage class (torch pickles float8 and unsigned integers in another way).
    """
    return _single_tensor_archive_bytes(tensor.dtype, tensor.shape, tensor.size_bytes)


@lru_cache(maxsize=4096)  # a checkpoint has thousands of tensors of a dozen shapes
def _single_tensor_archive_bytes(dtype: str, shape: tuple[int, ...], size_bytes: int) -> int:
    strides = [1]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * max(length, 1))
    pickle_bytes = 133 + len(_STORAGE_NAMES[dtype]) - len("FloatStorage")
    pickle_bytes += _int_bytes(prod(shape)) + 2  # number of elements, storage offset 0
    pickle_bytes += _tuple_bytes(shape)
    pickle_bytes += _tuple_bytes(strides[::-1] if shape else ())
    return archive_bytes(pickle_bytes, [size_bytes])


def state_dict_archive_bytes(tensors: Sequence[TensorSpec]) -> int:
    """About the size of `torch.save` of a nested dict with one storage per tensor, in bytes.

    The zip records are exact; the pickle is estimated, and what a framework pickles beside its
    tensors (arguments, parameter groups) is not in it: a few bytes to about 1 MB.
    """
    keys = {tensor.name.rpartition("/")[2] for tensor in tensors}
    pickled = _TENSOR_PICKLE * len(tensors) + sum(_KEY_PICKLE + len(key) for key in keys)
    return archive_bytes(_DICT_PICKLE + pickled, (t.size_bytes for t in tensors))


_TENSOR_PICKLE, _KEY_PICKLE, _DICT_PICKLE = 75, 10, 100  # averages of torch 2.13's own pickles


def _int_bytes(value: int) -> int:
    """Bytes of an int in pickle protocol 2."""
    if value < 2**8:
        return 2
    if value < 2**16:
        return 3
    if value < 2**31:
        return 5
    return 2 + value.bit_length() // 8 + 1


def _tuple_bytes(values: Sequence[int]) -> int:
    """Bytes of a tuple of ints in pickle protocol 2, with its place in the memo."""
    if not values:
        return 1
    mark = 1 if len(values) > 3 else 0
    return mark + sum(map(_int_bytes, values)) + 1 + 2
