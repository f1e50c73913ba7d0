"""Slicing: which of several jobs writes which bytes of the files that all of them hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from iobench.ranks.restore_plan import Range, fitting_align, slices, writers_of
from iobench.units import MIB

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
