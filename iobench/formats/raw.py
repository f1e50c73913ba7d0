"""raw files: the bytes of tensors, one after another. The reader must know dtypes and shapes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from iobench.formats.tensors import tensor_memory
from iobench.writers.config import WriterLike, writer_of
from iobench.writers.image import FileImage
from iobench.writers.transfer import Transfer

__all__ = ["image", "load", "save"]


def image(path: str, tensors: Iterable[torch.Tensor]) -> FileImage:
    """Return the image of the tensors' bytes in the given order. It shares their memory."""
    return FileImage.of(path, map(tensor_memory, tensors))


def save(
    tensors: Iterable[torch.Tensor],
    path: str,
    target: str | Path,
    writer: WriterLike,
    *,
    durable: bool = True,
    sync_directory: bool = True,
) -> Transfer:
    """Write the tensors' bytes to `target/path`; see `Writer.write` for durability."""
    made = image(path, tensors)
    return writer_of(writer).write(made, target, durable=durable, sync_directory=sync_directory)


def load(
    tensors: Iterable[torch.Tensor], path: str, target: str | Path, writer: WriterLike
) -> Transfer:
    """Fill `tensors` from `target/path`, in the given order.

    Raises UsageError for a tensor whose memory differs from its values: one that is not contiguous,
    or a lazy conjugate or negation.
    """
    return writer_of(writer).read(FileImage.of(path, tensors), target)
