"""Layout: how a framework splits a model's state into the files of each rank.

Sizes of the zip archives that torch.save writes are computed without writing them. A stream's
archive is named "archive". A file's archive has the file's stem as its name, which changes the size
by some bytes per record.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Annotated, ClassVar

from msgspec import Meta

from iobench.formats.safetensors_header import file_order, file_size
from iobench.formats.torch_zip import zip_bytes
from iobench.workloads.models.model import Model, Parameter
from iobench.workloads.specs import SAFETENSORS_METADATA, FileFormat, FileSpec, TensorSpec

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Precision in YAML -> torch dtype name."""

HF_FAMILIES = ("llama", "gpt2", "bloom")
"""Families whose tensors are named as transformers names them."""

MOE_FAMILIES = ("mixtral", "qwen3-moe", "deepseek-v3")
"""The same with mixtures of experts."""

MAX_RANKS = 2**17
"""Largest world size. It limits the time that a wrong number in a workload file can cost."""

Ranks = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
"""A number of ranks."""

STEP = 1000
"""The training step that appears in the paths of a replayed checkpoint."""

_SIZES = ("world_size", "tensor_parallel", "pipeline_parallel", "data_parallel")
"""Fields of layouts whose product is the number of ranks."""

_DCP_METADATA_BYTES = 286
"""Bytes of `.metadata` per stored chunk, from a published 4-rank DCP checkpoint; an estimate."""

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

_TENSOR_PICKLE, _KEY_PICKLE, _DICT_PICKLE = 75, 10, 100  # averages of torch 2.13's own pickles
_ONE_PICKLE = 126  # of one tensor, besides the name of its storage class and the numbers


@dataclass(frozen=True, kw_only=True)
class Layout(ABC):
    """Base of every layout. A subclass is a frozen dataclass with the fields of the YAML.

    `id` is the name in YAML; `families` are the model families that the layout can hold.
    """

    id: ClassVar[str]
    families: ClassVar[tuple[str, ...]]

    @property
    def ranks(self) -> int:
        """World size: the number of ranks of the job, including those that write nothing."""
        return prod(getattr(self, name, 1) for name in _SIZES)

    @abstractmethod
    def files(self, model: Model, rank: int) -> tuple[FileSpec, ...]:
        """Return every file that `rank` writes, in write order. `model` is a prepared model."""

    def size_bytes(self, model: Model, rank: int) -> int:
        """Return the bytes of all files of `rank`. A layout may know them without its files."""
        return sum(file.size_bytes for file in self.files(model, rank))

    @property
    def layer_step(self) -> int:
        """Layers are dropped in multiples of this, so that all pipeline stages stay equal."""
        return getattr(self, "pipeline_parallel", 1)

    def prepare(self, model: Model) -> Model:
        """Return the model in the form of this layout, such as with a padded vocabulary."""
        return model

    def check(self, model: Model) -> None:
        """Raise ValueError when the layout cannot hold the (prepared) model."""
        if model.family.id not in self.families:
            raise ValueError(
                f"layout {self.id!r} cannot hold a model of family {model.family.id!r}; "
                f"it holds {', '.join(self.families)}"
            )

    def rank_class(self, model: Model, rank: int) -> Hashable:
        """Return a key. Two ranks have the same key only if their files have the same sizes."""
        del model
        return rank

    def rank_classes(self, model: Model) -> list[tuple[int, int]]:
        """Return (first rank, number of ranks) for each group of ranks with equal file sizes."""
        counts: Counter[Hashable] = Counter()
        first: dict[Hashable, int] = {}
        for rank in range(self.ranks):
            key = self.rank_class(model, rank)
            counts[key] += 1
            first.setdefault(key, rank)
        return [(first[key], count) for key, count in counts.items()]


def decay_groups(parameters: Iterable[Parameter]) -> list[list[Parameter]]:
    """Return the optimizer's parameter groups: with and without weight decay."""
    listed = list(parameters)
    return [[p for p in listed if p.decays], [p for p in listed if not p.decays]]


def raw_file(path: str, size_bytes: int, *, exact: bool = False) -> FileSpec:
    blob = TensorSpec(name="blob", dtype="uint8", shape=(size_bytes,))
    return FileSpec(path=path, format="raw", tensors=(blob,), size_bytes=size_bytes, exact=exact)


def safetensors_file(path: str, tensors: Iterable[TensorSpec]) -> FileSpec:
    """Return a safetensors file: tensors in file order, exact size."""
    by_name = {tensor.name: tensor for tensor in tensors}
    described = [(t.name, t.dtype, t.shape) for t in by_name.values()]
    described.sort(key=file_order)
    size = file_size(described, SAFETENSORS_METADATA)
    ordered = tuple(by_name[name] for name, _, _ in described)
    return FileSpec(path=path, format="safetensors", tensors=ordered, size_bytes=size, exact=True)


def torch_file(path: str, tensors: Iterable[TensorSpec]) -> FileSpec:
    """Return a file of one torch.save. Its pickle is an estimate; its tensors are exact."""
    listed = tuple(tensors)
    size = state_dict_archive_bytes(listed)
    return FileSpec(path=path, format="torch", tensors=listed, size_bytes=size, exact=False)


def dcp_file(path: str, tensors: Iterable[TensorSpec], *, exact: bool) -> FileSpec:
    """Return a .distcp file: one torch.save archive per tensor, exact for these tensors."""
    listed = tuple(tensors)
    size = sum(map(single_tensor_archive_bytes, listed))
    return FileSpec(path=path, format="dcp", tensors=listed, size_bytes=size, exact=exact)


def file_of(
    path: str,
    file_format: FileFormat,
    tensors: Iterable[TensorSpec],
    size_bytes: int | None = None,
) -> FileSpec:
    """Return a file of this format; `size_bytes` is that of a raw or DCP file which exists."""
    if file_format == "safetensors":
        return safetensors_file(path, tensors)
    if file_format == "torch":
        return torch_file(path, tensors)
    if file_format == "dcp" and size_bytes is None:
        return dcp_file(path, tensors, exact=True)
    if file_format == "raw" and size_bytes is not None:
        return raw_file(path, size_bytes, exact=True)
    listed = tuple(tensors)
    size = sum(one.size_bytes for one in listed) if size_bytes is None else size_bytes
    return FileSpec(path=path, format=file_format, tensors=listed, size_bytes=size, exact=True)


def dcp_metadata_file(path: str, chunks: int) -> FileSpec:
    """Return DCP's `.metadata`: an estimate from the number of chunks of all ranks."""
    return raw_file(path, _DCP_METADATA_BYTES * chunks)


def index_file(path: str, shards: Sequence[FileSpec], parameters: int) -> FileSpec:
    """Return `model.safetensors.index.json` of `shards`, like transformers since 4.51."""
    size = sum(shard.payload_bytes for shard in shards)
    names = {t.name: shard.path for shard in shards for t in shard.tensors}
    return raw_file(path, len(shard_index(parameters, size, names)))


def shard_index(parameters: int, size_bytes: int, files: dict[str, str]) -> bytes:
    """Return the text of that file; `files` are the names of shards by tensor."""
    counts = {"total_parameters": parameters, "total_size": size_bytes}
    document = {"metadata": counts, "weight_map": files}
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


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
