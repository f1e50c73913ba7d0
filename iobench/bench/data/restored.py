"""RestoredFile: a file of a replay that was opened to be read back into windows of the pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from iobench.errors import DataMismatchError
from iobench.formats import safetensors, torch_file
from iobench.units import MIB
from iobench.workloads.specs import FileFormat
from iobench.writers.base import Writer
from iobench.writers.image import Bytes, FileImage

_READ_AGAIN_STEP = 64 * MIB  # so that a long tensor is never resident as a whole


@dataclass(frozen=True, kw_only=True)
class RestoredFile:
    """A file's image, which a read fills, and the memory of its tensors in payload order."""

    image: FileImage
    payload: Sequence[Bytes]

    @classmethod
    def open(
        cls,
        path: str,
        file_format: FileFormat,
        payload: Sequence[Bytes],
        writer: Writer,
        directory: str | Path,
    ) -> RestoredFile:
        """Read the file's header, and place its tensors in the memory `payload`.

        Raises DataMismatchError for a file of tensors of other sizes.
        """
        filled = iter([memory for memory in payload if len(memory)])
        other = DataMismatchError(f"{path}: holds other tensors than were saved")

        def allocate(size_bytes: int) -> Bytes:
            if not size_bytes:  # some formats do not call this for empty tensors
                return np.empty(0, np.uint8)
            memory = next(filled, None)
            if memory is None or len(memory) != size_bytes:
                raise other
            return memory

        if file_format == "safetensors":
            _, image = safetensors.prepare(path, directory, writer, allocate=allocate)
        elif file_format == "torch":
            _, image = torch_file.prepare(path, directory, writer, allocate=allocate)
        else:
            image = FileImage.of(path, [allocate(len(memory)) for memory in payload])
        if next(filled, None) is not None:
            raise other
        return cls(image=image, payload=payload)

    @cached_property
    def _offsets(self) -> dict[int, int]:
        return {id(segment.memory): segment.offset for segment in self.image.segments}

    def read_again(
        self, tensor: int, step_bytes: int, writer: Writer, directory: str | Path
    ) -> Iterator[Bytes]:
        """Yield one tensor's bytes in parts of at most `step_bytes`; read each just before."""
        memory = self.payload[tensor]
        offset = self._offsets.get(id(memory), 0)
        step = min(step_bytes, _READ_AGAIN_STEP)
        for begin in range(0, len(memory), step):
            end = min(begin + step, len(memory))
            # The memory may hold the right bytes already, from another window of the same part of
            # the pool. Inverted bytes are wrong unless the read replaces them.
            np.invert(memory[begin:end], out=memory[begin:end])
            writer.read(self.image, directory, start=offset + begin, stop=offset + end)
            yield memory[begin:end]
