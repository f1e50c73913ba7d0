"""raw files: tensors one after another, with nothing around them. The reader must know them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from iobench.errors import UsageError
from iobench.formats.tensors import tensor_memory
from iobench.writers.base import Writer
from iobench.writers.image import FileImage
from iobench.writers.transfer import Transfer

__all__ = ["image", "load", "save"]


def image(path: str, tensors: Iterable[torch.Tensor]) -> FileImage:
    """The image of the tensors' bytes in the order given; their memory is the image's."""
    return FileImage.of(path, map(tensor_memory, tensors))


def save(
    tensors: Iterable[torch.Tensor],
    path: str,
    target: str | Path,
    writer: Writer,
    *,
    durable: bool = True,
    sync_directory: bool = True,
) -> Transfer:
    """Write the tensors' bytes to `target/path`; see `Writer.write` for durability."""
    return writer.write(
        image(path, tensors), target, durable=durable, sync_directory=sync_directory
    )


def load(
    tensors: Iterable[torch.Tensor], path: str, target: str | Path, writer: Writer
) -> Transfer:
    """Fill `tensors` from `target/path`, in the order given.

    Raises UsageError for a tensor whose values are not in its memory as they are in a file: one
    that is not contiguous, or a lazy conjugate or negation.
    """
    listed = list(tensors)
    for index, tensor in enumerate(listed):
        _check_fillable(index, tensor)
    return writer.read(image(path, listed), target)


def _check_fillable(index: int, tensor: torch.Tensor) -> None:
    """A copy would be filled in place of the tensor, and dropped."""
    if tensor.layout != torch.strided:
        return  # it has no memory as others have, which the image tells
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise UsageError(
            f"tensor {index} of shape {tuple(tensor.shape)} is not contiguous, or a view that "
            "conjugates or negates; load into a new tensor and copy from that"
        )
