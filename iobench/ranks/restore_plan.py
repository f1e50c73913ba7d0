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

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from iobench.errors import OptionError
from iobench.units import KIB

MAX_IMBALANCE = 0.01
"""Largest share of bytes that a rank writes above the mean of its node's writers."""
_SMALLEST = 64 * KIB


class Range(NamedTuple):
    """Bytes [start, stop) of the item `item`, which is a tensor or a file."""

    item: int
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        """The number of bytes."""
        return self.stop - self.start


def slices(
    sizes: Sequence[int],
    nodes: Sequence[int],
    *,
    align: int | Sequence[int],
    writers_per_node: int | None = None,
) -> list[list[Range]]:
    """Return the ranges that each rank writes: together every byte of every item, once.

    `sizes` are the bytes of the items, in an order that is equal on all ranks. `nodes[rank]` is the
    node of each rank that holds all items. Each node gets the same number of bytes, and so does
    each writer of one node: its first `writers_per_node` ranks, or all. Items are cut at multiples
    of `align` bytes only (one number, or one for each item): a writer has at most `align` bytes
    more than its share. Fewer blocks than ranks go to different nodes first.

    Raises OptionError for no ranks, and for an `align` or `writers_per_node` below 1.
    """
    steps = [align] * len(sizes) if isinstance(align, int) else list(align)
    if len(steps) != len(sizes) or min(steps, default=1) < 1:
        raise OptionError(f"align={align}: one number of 1 or more, or one for each item")
    ends = [0, *itertools.accumulate(sizes)]
    found: list[list[Range]] = [[] for _ in nodes]
    begin = 0
    for rank, wanted in _ends_of_shares(ends[-1], nodes, writers_per_node):
        end = _nearest_cut(wanted, ends, steps)
        found[rank] = _between(begin, end, ends)
        begin = end
    return found


def writers_of(nodes: Sequence[int], writers_per_node: int | None = None) -> list[list[int]]:
    """Return the ranks that write on each node, in the order of the nodes' first ranks."""
    if not nodes or (writers_per_node is not None and writers_per_node < 1):
        raise OptionError(
            f"writers_per_node={writers_per_node} of {len(nodes)} ranks: at least 1 of 1"
        )
    members: dict[int, list[int]] = defaultdict(list)
    for rank, node in enumerate(nodes):
        members[node].append(rank)
    return [ranks[:writers_per_node] for ranks in members.values()]


def fitting_align(size_bytes: int, writers: int, block_size: int) -> int:
    """Return the largest power-of-two fraction of `block_size` that keeps shares equal within 1%.

    Not below 64 KiB, or `block_size` if that is less: smaller writes cost more than shares of
    less than 6.4 MiB gain by equality.
    """
    align = block_size
    while align > _SMALLEST and align * writers > size_bytes * MAX_IMBALANCE:
        align //= 2
    return align


def _ends_of_shares(
    size_bytes: int, nodes: Sequence[int], writers_per_node: int | None
) -> list[tuple[int, int]]:
    """Return (rank, end of its share) of each writer. Nodes get equal shares, then writers."""
    groups = writers_of(nodes, writers_per_node)
    return [
        (rank, size_bytes * (number * len(ranks) + place) // (len(groups) * len(ranks)))
        for number, ranks in enumerate(groups)
        for place, rank in enumerate(ranks, start=1)
    ]


def _nearest_cut(wanted: int, ends: Sequence[int], steps: Sequence[int]) -> int:
    """Return the position nearest to `wanted` at which an item may be cut."""
    if wanted >= ends[-1]:
        return ends[-1]
    item = bisect.bisect_right(ends, wanted) - 1
    below = wanted - (wanted - ends[item]) % steps[item]
    above = min(below + steps[item], ends[item + 1])
    return below if wanted - below < above - wanted else above


def _between(begin: int, end: int, ends: Sequence[int]) -> list[Range]:
    """Return the ranges of the items that are in [begin, end) of all items together."""
    found = []
    item = bisect.bisect_right(ends, begin) - 1
    while begin < end:
        stop = min(end, ends[item + 1])
        if stop > begin:
            found.append(Range(item, begin - ends[item], stop - ends[item]))
        begin, item = stop, item + 1
    return found


ReadMode = Literal["all", "broadcast", "all-gather"]
MODES: tuple[ReadMode, ...] = get_args(ReadMode)
RestoreMode = Literal["all", "broadcast", "all-gather", "auto"]
RESTORE_MODES: tuple[RestoreMode, ...] = get_args(RestoreMode)


def check_restore_mode(mode: str) -> None:
    """Raise OptionError if `mode` is not one of RESTORE_MODES."""
    if mode not in RESTORE_MODES:
        raise OptionError(f"restore_mode={mode!r}: choose {', '.join(RESTORE_MODES)}")


class Shared(NamedTuple):
    """Bytes of a file, and the ranks that need them."""

    range: Range
    ring: tuple[int, ...]


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
        return [Shared(part, tuple(order)) for part in wanted[0]]
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
            found.append(Shared(Range(item, start, stop), ring))
    return found


def head(parts: Sequence[Shared], size_bytes: int) -> tuple[list[Shared], list[Shared]]:
    """Return the first `size_bytes` of what several ranks want, and all else."""
    taken, left = list[Shared](), list[Shared]()
    for part, ring in parts:
        size = min(size_bytes, part.size_bytes) if len(ring) > 1 else 0
        size_bytes -= size
        cut = part.start + size
        if size:
            taken.append(Shared(part._replace(stop=cut), ring))
        if cut < part.stop:
            left.append(Shared(part._replace(start=cut), ring))
    return taken, left


def plan(
    parts: Sequence[Shared], mode: ReadMode, nodes: Sequence[int], *, piece_bytes: int
) -> ReadPlan:
    """Return who reads the bytes of `parts`, and the pieces of at most `piece_bytes` to pass on.

    Bytes that one rank wants are read by this rank in every mode.
    """
    reads: list[list[Range]] = [[] for _ in nodes]
    pieces: list[RingPiece] = []
    groups: dict[tuple[int, ...], list[Range]] = defaultdict(list)
    for part, ring in parts:
        groups[ring].append(part)
    for ring, members in groups.items():
        if mode == "all" or len(ring) == 1:
            for rank in ring:
                reads[rank] += members
            continue
        readers = ring if mode == "all-gather" else ring[:1]
        sizes = [part.size_bytes for part in members]
        align = fitting_align(sum(sizes), len(readers), piece_bytes)
        cut = slices(sizes, [nodes[rank] for rank in readers], align=align)
        for rank, ranges in zip(readers, cut, strict=True):
            for number, start, stop in ranges:
                file, begin, _ = members[number]
                reads[rank].append(Range(file, begin + start, begin + stop))
                pieces += _pieces(reads[rank][-1], rank, ring, piece_bytes)
    return ReadPlan([merged(ranges) for ranges in reads], pieces)


def held_plan(
    parts: Sequence[Shared],
    holders: Mapping[int, Sequence[int]],
    nodes: Sequence[int],
    *,
    piece_bytes: int,
) -> ReadPlan:
    """Return a plan in which ranks that have a file in memory pass it on to those that need it.

    `holders` maps numbers of files to such ranks. They read what they need themselves, and so do
    all ranks where no rank has the file.
    """
    reads: list[list[Range]] = [[] for _ in nodes]
    pieces: list[RingPiece] = []
    for part, ring in parts:
        able = holders.get(part.item, ())
        lacking = tuple(rank for rank in ring if rank not in able) if able else ()
        for rank in ring:
            if rank not in lacking:
                reads[rank].append(part)
        if lacking:
            sender = able[part.item % len(able)]
            pieces += _pieces(part, sender, (sender, *lacking), piece_bytes)
    return ReadPlan([merged(ranges) for ranges in reads], pieces)


def _pieces(
    part: Range, reader: int, ring: tuple[int, ...], piece_bytes: int
) -> Iterable[RingPiece]:
    edges = [*range(part.start, part.stop, piece_bytes), part.stop]
    return (RingPiece(part.item, *edge, reader, ring) for edge in itertools.pairwise(edges))
