"""raw files: tensors one after another, with nothing around them. The reader must know them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

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
    """Fill `tensors` (contiguous) from `target/path`, in the order given."""
    return writer.read(image(path, tensors), target)
