"""RestoredFile: a file of a replay that was opened to be read back into windows of the pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from iobench.bench.data.pool import Window, Windows
from iobench.errors import DataMismatchError
from iobench.formats import safetensors, torch_file
from iobench.units import MIB
from iobench.workloads.specs import FileSpec
from iobench.writers.base import Writer
from iobench.writers.image import Bytes, FileImage

__all__ = ["Payload", "RestoredFile"]

_READ_AGAIN_STEP = 64 * MIB  # so that a long tensor is never resident as a whole


@dataclass(frozen=True, kw_only=True)
class Payload:
    """The offset of one tensor's bytes in the file, and their window of the pool."""

    offset: int
    window: Window


@dataclass(frozen=True, kw_only=True)
class RestoredFile:
    """A file's image, which a read fills, and its payload in file order."""

    image: FileImage
    payload: tuple[Payload, ...]

    @classmethod
    def open(
        cls,
        spec: FileSpec,
        windows: Windows,
        longest_bytes: int,
        writer: Writer,
        directory: str | Path,
    ) -> RestoredFile:
        """Read the file's header and give its tensors the next of `windows`.

        Raises DataMismatchError for a file whose tensors are not those of `spec`.
        """
        taken: list[Window] = []
        other = DataMismatchError(f"{spec.path}: holds other tensors than were saved")

        def allocate(size_bytes: int) -> Bytes:
            if size_bytes > longest_bytes:
                raise other
            window = windows.take(size_bytes)
            if size_bytes:  # some formats do not call this for empty tensors
                taken.append(window)
            return window.memory

        if spec.format == "safetensors":
            _, image = safetensors.prepare(spec.path, directory, writer, allocate=allocate)
        elif spec.format == "torch":
            _, image = torch_file.prepare(spec.path, directory, writer, allocate=allocate)
        else:
            image = FileImage.of(spec.path, [allocate(t.size_bytes) for t in spec.tensors])
        sizes = [tensor.size_bytes for tensor in spec.tensors]
        if [len(window.memory) for window in taken] != [size for size in sizes if size]:
            raise other
        offsets = {id(segment.memory): segment.offset for segment in image.segments}
        in_order = iter(taken)
        payload = []
        for size in sizes:
            window = next(in_order) if size else windows.take(0)
            payload.append(Payload(offset=offsets.get(id(window.memory), 0), window=window))
        return cls(image=image, payload=tuple(payload))

    def read_again(
        self, payload: Payload, step_bytes: int, writer: Writer, directory: str | Path
    ) -> Iterator[Bytes]:
        """Yield one tensor's bytes in parts of at most `step_bytes`; read each just before."""
        memory = payload.window.memory
        step = min(step_bytes, _READ_AGAIN_STEP)
        for begin in range(0, len(memory), step):
            end = min(begin + step, len(memory))
            # The memory may hold the right bytes already, from another window of the same part of
            # the pool. Inverted bytes are wrong unless the read replaces them.
            np.invert(memory[begin:end], out=memory[begin:end])
            writer.read(
                self.image, directory, start=payload.offset + begin, stop=payload.offset + end
            )
            yield memory[begin:end]
