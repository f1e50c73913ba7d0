"""Slicing: which of several jobs writes which bytes of the files that all of them hold.

SlicedFiles: the files that they wrote in slices, read as if each were one file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from iobench.errors import DataMismatchError
from iobench.ranks.restore_plan import Range, fitting_align, slices, writers_of
from iobench.units import MIB
from iobench.writers.base import Availability, RangeSource, Source, Writer
from iobench.writers.image import AnyMemory, Bytes, FileImage
from iobench.writers.stream import BlockStream
from iobench.writers.transfer import Meter, Transfer

OFF, ALL = "off", "all"
"""The first job writes everything; every job writes a slice. Otherwise so many of each node do."""

_BLOCK_BYTES = 8 * MIB  # cuts are at multiples of it, as far as that keeps slices equal


@dataclass(frozen=True, kw_only=True)
class Sliced:
    """`jobs` jobs hold the same files, and save them once. `how` is `off`, `all` or a number."""

    how: str
    jobs: int


class FileSlice(NamedTuple):
    """Bytes [start, stop) of a file, which `job` writes as a file of its own."""

    job: int
    start: int
    stop: int


class Slicing:
    """The slices of some files: every byte once, in equal shares, like those of a Checkpointer."""

    def __init__(
        self, paths: Iterable[str], sizes: Sequence[int], nodes: Sequence[int], how: str
    ) -> None:
        """`nodes` has the node of each job. Raises OptionError for a number of writers below 1."""
        holders = nodes[:1] if how == OFF else nodes
        each = None if how in (OFF, ALL) else int(how)
        writers = sum(map(len, writers_of(holders, each)))
        align = fitting_align(sum(sizes), writers, _BLOCK_BYTES)
        self.ranges: list[list[Range]] = [[] for _ in nodes]
        """What each job writes, in the order of the files; at most one range of each."""
        self.ranges[: len(holders)] = slices(sizes, holders, align=align, writers_per_node=each)
        empty = [Range(number, 0, 0) for number, size in enumerate(sizes) if not size]
        self.ranges[0] = sorted(self.ranges[0] + empty)
        parts: dict[int, list[FileSlice]] = defaultdict(list)
        for job, ranges in enumerate(self.ranges):
            for item, start, stop in ranges:
                parts[item].append(FileSlice(job, start, stop))
        self.slices = {
            path: sorted(parts[item], key=lambda part: part.start)
            for item, path in enumerate(paths)
        }
        """The slices of each file by its path, in the order of the file."""


class SliceImage(FileImage):
    """The bytes [start, stop) of the image `whole`, as the image of the file `path`.

    Nothing is computed before a writer takes it: some images compute checksums while they are read.
    """

    def __init__(self, whole: FileImage, start: int, stop: int, path: str) -> None:
        whole._check_range(start, stop)
        self.path, self.size_bytes, self.on_device = path, stop - start, whole.on_device
        self._whole, self._begin = whole, start

    def parts(self) -> Iterator[tuple[int, AnyMemory]]:
        begin, end = self._begin, self._begin + self.size_bytes
        for offset, memory in self._whole.parts():
            first, last = max(begin, offset), min(end, offset + len(memory))
            if first < last:
                yield first - begin, memory[first - offset : last - offset]

    @property
    def writable(self) -> bool:
        return self._whole.writable

    def pieces(self, start: int, stop: int) -> list[AnyMemory]:
        self._check_range(start, stop)
        return self._whole.pieces(self._begin + start, self._begin + stop)

    def room(self, start: int, stop: int) -> list[AnyMemory]:
        return self._whole.room(self._begin + start, self._begin + stop)

    def in_one_piece(self, start: int, stop: int) -> bool:
        return self._whole.in_one_piece(self._begin + start, self._begin + stop)

    @contextmanager
    def incoming(self, start: int, stop: int, meter: Meter) -> Iterator[list[Bytes]]:
        begin, end = self._begin + start, self._begin + stop
        with self._whole.incoming(begin, end, meter) as views:
            yield views

    def scatter(self, start: int, stop: int, block: Bytes) -> int:
        return self._whole.scatter(self._begin + start, self._begin + stop, block)

    def filled(self, start: int, stop: int) -> None:
        self._whole.filled(self._begin + start, self._begin + stop)


class SlicedFiles(Writer):
    """Reads the files below one location by `writer`, slice by slice.

    `slices` has the slices of each file by its path, in file order. The slice of a job is the file
    of the same path below `name_of(job)`. Each must have the size that its slice says.
    """

    name = "slices"
    summary = "reads files that were written in slices"
    schemes = ()  # there is nothing at the path of a file

    @classmethod
    def check_scheme(cls, target: str | Path) -> None:
        """Accept every target: the writer of the slices checks it."""

    def __init__(
        self,
        writer: Writer,
        location: str | Path,
        slices: Mapping[str, Sequence[FileSlice]],
        name_of: Callable[[int], str],
    ) -> None:
        self.options = writer.options
        self._writer, self._location = writer, str(location)
        self._slices, self._name_of = slices, name_of

    def read(
        self, image: FileImage, target: str | Path, *, start: int = 0, stop: int | None = None
    ) -> Transfer:
        start, stop = self._range_to_fill(image, start, stop)
        return Transfer.total(self._parts(image, target, start, stop))

    def _parts(
        self, image: FileImage, target: str | Path, start: int, stop: int
    ) -> Iterator[Transfer]:
        yield Meter().transfer(self._writer.name, "read", 0, durable=True, files=0)
        for part in self._slices[image.path]:
            first, last = max(start, part.start), min(stop, part.stop)
            if first < last or part.start == part.stop:
                path = f"{self._name_of(part.job)}/{image.path}"
                one = SliceImage(image, part.start, part.stop, path)
                begin, end = first - part.start, last - part.start
                yield self._writer.read(one, target, start=begin, stop=end)

    def open_source(self, target: str | Path) -> Source:
        path = str(target).removeprefix(f"{self._location}/")

        def opened(job: int) -> Source:
            return self._writer.open_source(f"{self._location}/{self._name_of(job)}/{path}")

        return _SlicedSource(self._slices[path], opened)

    def write(self, *_: Any, **__: Any) -> Transfer:
        raise NotImplementedError("jobs write slices by the writer itself")

    def open(self, target: str | Path, size: int | None = None) -> BlockStream:
        raise NotImplementedError("jobs write slices by the writer itself")

    def available(self, target: str | Path = ".") -> Availability:
        return self._writer.available(target)


class _SlicedSource(RangeSource):
    """A file in slices, opened for inspection. A slice is opened when a byte of it is read."""

    def __init__(self, slices: Sequence[FileSlice], opened: Callable[[int], Source]) -> None:
        super().__init__()
        self._slices, self._opened = slices, opened
        self._sources: dict[int, Source] = {}
        self.size_bytes = slices[-1].stop

    def _fill(self, offset: int, room: Bytes) -> int:
        filled = 0
        for job, start, stop in self._slices:
            at = offset + filled
            wanted = min(len(room) - filled, stop - at)
            if start <= at and wanted > 0:
                (data,) = self._source(job).read_at([at - start], wanted)
                if len(data) != wanted:
                    raise DataMismatchError(
                        f"the slice of process {job} ends before byte {stop} of the file; "
                        "it was changed after the save"
                    )
                room[filled : filled + wanted] = np.frombuffer(data, np.uint8)
                filled += wanted
        return filled

    def _source(self, job: int) -> Source:
        if job not in self._sources:
            self._sources[job] = self._opened(job)
        return self._sources[job]

    def close(self) -> None:
        """Release the slices."""
        for source in self._sources.values():
            source.close()
        super().close()
