"""RankContent: what one rank writes in a save, before any copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from iobench.checkpoint.aliases import Leaf
from iobench.checkpoint.ranked.plan import BoxSource, RankPlan
from iobench.checkpoint.ranked.structure import RankStructure
from iobench.checkpoint.streamed import Streamed
from iobench.formats.tensor_layouts import Located
from iobench.formats.tensors import tensor_bytes
from iobench.writers.image import Bytes, FileImage

__all__ = ["RankContent", "data_file"]


def data_file(rank: int) -> str:
    """Return the name of a rank's file, as in stock DCP."""
    return f"__{rank}_0.distcp"


@dataclass(frozen=True, kw_only=True)
class RankContent:
    """The parts of tensors that this rank writes; the tensors are still the trainer's memory.

    `number` counts the saves of this job, -1 before all ranks have agreed to it. `processes` are
    the ranks of this machine. `skeleton` is the JSON of the state around the tensors. `alike`: all
    ranks have the same skeleton, PerRank excepted.
    """

    number: int
    rank: int
    processes: int
    structure: RankStructure = field(repr=False)
    plan: RankPlan = field(repr=False)
    skeleton: str = field(repr=False)
    alike: bool
    tensors: list[torch.Tensor] = field(repr=False)
    located: Located = field(repr=False)
    streamed: Streamed | None = field(default=None, repr=False)

    @property
    def size_bytes(self) -> int:
        """Bytes of this rank's tensors in its file."""
        return self.plan.file.size_bytes

    @property
    def job_bytes(self) -> int:
        """Bytes of the tensors of all ranks, in rank 0."""
        assert self.plan.whole is not None
        return self.plan.whole.size_bytes

    @property
    def on_cpu(self) -> bool:
        return self.structure.on_cpu

    @property
    def names(self) -> list[str]:
        """The names of `tensors`."""
        return self.structure.names

    def _stored(self) -> Iterator[tuple[BoxSource, tuple[int, ...]]]:
        """Yield the source and the shape of each box with elements, in file order."""
        for box, source in zip(self.plan.boxes, self.plan.sources, strict=True):
            if 0 not in box.sizes:
                yield source, box.sizes

    def _view(self, source: BoxSource, sizes: tuple[int, ...]) -> torch.Tensor:
        tensor = self.tensors[source.number].detach()
        if source.narrow is not None:
            for dim, (begin, size) in enumerate(source.narrow):
                tensor = tensor.narrow(dim, begin, size)
            return tensor
        strides, step = list[int](), 1
        for size in reversed(sizes):
            strides.insert(0, step)
            step *= size
        offset = tensor.storage_offset() + source.shift // tensor.element_size()
        return tensor.as_strided(sizes, strides, offset)

    def leaves(self) -> dict[str, Leaf]:
        """Return the boxes with elements, on the memory of the state."""
        return {
            f"{number}": Leaf.of_tensor(self._view(source, sizes))
            for number, (source, sizes) in enumerate(self._stored())
        }

    def parts(self) -> Iterator[tuple[int, Leaf | Bytes]]:
        """Yield the offset in the file and the bytes of every part of it."""
        yield from self.plan.file.texts()
        stored = [item for item in self.plan.file.items if item.data_bytes]
        for item, leaf in zip(stored, self.leaves().values(), strict=True):
            yield item.data_start, leaf

    def image(self) -> FileImage:
        """Return the file on the trainer's CPU memory, without the checksums in torch's format."""
        places = self.plan.places
        apart = {}
        if places.apart:
            stored = list(self._stored())
            apart = {number: tensor_bytes(self._view(*stored[number])) for number in places.apart}
        return self._image(apart)

    def piece_end(self, position: int) -> int:
        """Return the end of the item that begins before `position` and ends after it.

        Or `position`, if there is none.
        """
        items = self.plan.file.items
        return next((one.stop for one in items if one.start < position < one.stop), position)

    def whole_image(self, end: bytes = b"") -> FileImage:
        """Return the file with its checksums, and then `end`, on the trainer's CPU memory.

        A checksum is computed when a writer takes its bytes.
        """
        data = [tensor_bytes(self._view(*one)) for one in self._stored()]
        return self._image({number: data[number] for number in self.plan.places.apart}, data, end)

    def _image(
        self, apart: dict[int, Bytes], data: list[Bytes] | None = None, end: bytes = b""
    ) -> FileImage:
        places = self.plan.places
        addresses = self.located.addresses[places.numbers] + places.shifts
        return self.plan.file.image(
            data_file(self.rank),
            addresses,
            apart,
            (self.located.owners, self.tensors),
            data=data,
            end=end,
        )

    def image_in(self, memory: Bytes, end: bytes) -> FileImage:
        """Return the file whose snapshot is in `memory`, and then `end`.

        A checksum is computed, and written into `memory`, when a writer takes its bytes.
        """
        path, file = data_file(self.rank), self.plan.file
        if self.streamed is None:
            return file.image_in(path, memory, end)
        return self.streamed.image(file.image_in(path, memory, end, begin=self.streamed.begin))

    def to_be_copied_later(self) -> RankContent:
        """Return the same for a copy while the trainer goes on: arrays are copied at once."""
        count = self.structure.tensor_count
        tensors = [tensor.detach() for tensor in self.tensors[:count]]
        copies = [tensor.clone() for tensor in self.tensors[count:]]
        located = self.structure.layouts.locate([*tensors, *copies])
        assert located is not None  # the same layouts
        return replace(self, tensors=[*tensors, *copies], located=located)

    def without_memory(self, streamed: Streamed | None = None) -> RankContent:
        """Return what is needed after the copy: it keeps no tensor and no array alive."""
        return replace(self, tensors=[], located=Located.nowhere(), streamed=streamed)
