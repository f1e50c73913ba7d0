"""slices: which rank writes which bytes of the state that several ranks hold.

Method: G. Wang et al., "FastPersist: Accelerating Model Checkpointing in Deep Learning", 2024,
section 4.2: replicated state is written once, cut by bytes over the ranks that hold it.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from iobench.errors import OptionError
from iobench.units import KIB

__all__ = ["MAX_IMBALANCE", "Range", "fitting_align", "slices", "writers_of"]

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
