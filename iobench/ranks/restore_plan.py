"""Read plan: which rank reads which bytes from storage, and which way they take to the others.

    all         each rank reads what it needs
    broadcast   one rank reads what several need, and passes it on
    all-gather  each of these ranks reads an equal part, and passes it on

The ranks that need the same bytes form a ring, ordered by node. A piece goes from the rank that
read it to the next one and on, until all have it: each rank sends and receives a byte once at most,
and a node's link carries it once in each direction. The reader of a piece is the only difference
between the modes.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from iobench.errors import OptionError
from iobench.ranks.slices import Range, fitting_align, slices

__all__ = [
    "MODES",
    "RESTORE_MODES",
    "ReadMode",
    "ReadPlan",
    "RestoreMode",
    "RingPiece",
    "Shared",
    "check_restore_mode",
    "head",
    "merged",
    "owner_plan",
    "plan",
    "shared",
]

ReadMode = Literal["all", "broadcast", "all-gather"]
MODES: tuple[ReadMode, ...] = get_args(ReadMode)
RestoreMode = Literal["all", "broadcast", "all-gather", "auto"]
RESTORE_MODES: tuple[RestoreMode, ...] = get_args(RestoreMode)


def check_restore_mode(mode: str) -> None:
    """Raise OptionError if `mode` is not one of RESTORE_MODES."""
    if mode not in RESTORE_MODES:
        raise OptionError(f"restore_mode={mode!r}: choose {', '.join(RESTORE_MODES)}")


class Shared(NamedTuple):
    """Bytes [start, stop) of the file number `file`, and the ranks that need them."""

    file: int
    start: int
    stop: int
    ring: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """The number of bytes."""
        return self.stop - self.start


class RingPiece(NamedTuple):
    """Bytes that travel together; `reader` reads them, and they go round `ring` from there."""

    file: int
    start: int
    stop: int
    reader: int
    ring: tuple[int, ...]

    def before(self, rank: int) -> int | None:
        """Return the rank that sends this piece to `rank`; None for its reader."""
        return None if rank == self.reader else self.ring[self.ring.index(rank) - 1]

    def after(self, rank: int) -> int | None:
        """Return the rank to which `rank` sends this piece; None for the last one."""
        following = self.ring[(self.ring.index(rank) + 1) % len(self.ring)]
        return None if following == self.reader else following


class ReadPlan(NamedTuple):
    """`reads[rank]`: the ranges that each rank reads. `pieces`: those that go to other ranks."""

    reads: list[list[Range]]
    pieces: list[RingPiece]

    @property
    def read_bytes(self) -> int:
        """The bytes that all ranks together read from storage."""
        return sum(part.size_bytes for ranges in self.reads for part in ranges)


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Return the same bytes as ranges in file order that neither touch nor overlap."""
    found: list[Range] = []
    for part in sorted(ranges):
        if found and found[-1].item == part.item and part.start <= found[-1].stop:
            found[-1] = Range(part.item, found[-1].start, max(part.stop, found[-1].stop))
        elif part.stop > part.start:
            found.append(part)
    return found


def shared(wanted: Sequence[Sequence[Range]], nodes: Sequence[int]) -> list[Shared]:
    """Return the bytes that ranks want, each once, with the ranks that want it in ring order.

    `wanted[rank]` are ranges without overlaps, for which `item` is the number of a file.
    """
    order = sorted(range(len(wanted)), key=lambda rank: (nodes[rank], rank))
    if all(ranges == wanted[0] for ranges in wanted):
        return [Shared(*part, tuple(order)) for part in wanted[0]]
    edges: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, ranges in enumerate(wanted):
        for item, start, stop in ranges:
            edges[item, start].append(rank)
            edges[item, stop].append(rank)
    found: list[Shared] = []
    present = set[int]()
    rings: dict[frozenset[int], tuple[int, ...]] = {}
    points = sorted(edges)
    for (item, start), (_, stop) in zip(points, [*points[1:], (0, 0)], strict=True):
        for rank in edges[item, start]:
            present ^= {rank}
        if present:  # empty after the last point of a file
            key = frozenset(present)
            ring = rings.setdefault(key, tuple(rank for rank in order if rank in key))
            found.append(Shared(item, start, stop, ring))
    return found


def head(parts: Sequence[Shared], size_bytes: int) -> tuple[list[Shared], list[Shared]]:
    """Return the first `size_bytes` of what several ranks want, and all else."""
    taken, left = list[Shared](), list[Shared]()
    for part in parts:
        size = min(size_bytes, part.size_bytes) if len(part.ring) > 1 else 0
        size_bytes -= size
        cut = part.start + size
        if size:
            taken.append(part._replace(stop=cut))
        if cut < part.stop:
            left.append(part._replace(start=cut))
    return taken, left


def plan(
    parts: Sequence[Shared], mode: ReadMode, nodes: Sequence[int], *, piece_bytes: int
) -> ReadPlan:
    """Return who reads the bytes of `parts`, and the pieces of at most `piece_bytes` to pass on.

    Bytes that one rank wants are read by this rank in every mode.
    """
    reads: list[list[Range]] = [[] for _ in nodes]
    pieces: list[RingPiece] = []
    groups: dict[tuple[int, ...], list[Shared]] = defaultdict(list)
    for part in parts:
        groups[part.ring].append(part)
    for ring, members in groups.items():
        if mode == "all" or len(ring) == 1:
            for rank in ring:
                reads[rank] += [Range(part.file, part.start, part.stop) for part in members]
            continue
        readers = ring if mode == "all-gather" else ring[:1]
        sizes = [part.size_bytes for part in members]
        align = fitting_align(sum(sizes), len(readers), piece_bytes)
        cut = slices(sizes, [nodes[rank] for rank in readers], align=align)
        for rank, ranges in zip(readers, cut, strict=True):
            for number, start, stop in ranges:
                file, begin = members[number].file, members[number].start
                reads[rank].append(Range(file, begin + start, begin + stop))
                pieces += _pieces(reads[rank][-1], rank, ring, piece_bytes)
    return ReadPlan([merged(ranges) for ranges in reads], pieces)


def owner_plan(
    parts: Sequence[Shared],
    owners: Mapping[int, int],
    nodes: Sequence[int],
    *,
    piece_bytes: int,
) -> ReadPlan:
    """Return a plan in which each file is read by its owner, and passed on to those that need it.

    `owners` maps numbers of files to ranks. A rank reads the bytes itself if the owner does not
    need them.
    """
    reads: list[list[Range]] = [[] for _ in nodes]
    pieces: list[RingPiece] = []
    for part in parts:
        found, owner = Range(part.file, part.start, part.stop), owners.get(part.file, -1)
        if owner not in part.ring or len(part.ring) == 1:
            for rank in part.ring:
                reads[rank].append(found)
            continue
        reads[owner].append(found)
        pieces += _pieces(found, owner, part.ring, piece_bytes)
    return ReadPlan([merged(ranges) for ranges in reads], pieces)


def _pieces(
    part: Range, reader: int, ring: tuple[int, ...], piece_bytes: int
) -> Iterable[RingPiece]:
    edges = [*range(part.start, part.stop, piece_bytes), part.stop]
    return (RingPiece(part.item, *edge, reader, ring) for edge in itertools.pairwise(edges))
