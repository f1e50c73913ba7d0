"""Placement: which node keeps a rank's copy, and which ranks share parity. Pure functions."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

from iobench.dist.replicas.pieces import PIECE
from iobench.errors import UsageError

__all__ = ["chunk_bytes", "chunk_of", "parity_groups", "partner_nodes"]


def partner_nodes(count: int) -> list[int]:
    """Return, for each of `count` nodes, the node that keeps the copies of its ranks.

    Nodes are paired, 0 with 1, 2 with 3. Of an odd count the last three form a ring. So two failed
    nodes lose a copy with the least probability (Gemini, section 4, "mixed placement"). Raises
    UsageError for one node.
    """
    if count < 2:
        raise UsageError(f"a partner needs 2 nodes or more, this job has {count}")
    paired = count if count % 2 == 0 else count - 3
    partners = [node ^ 1 for node in range(paired)]
    ring = range(paired, count)
    return partners + [ring[(place + 1) % len(ring)] for place in range(len(ring))]


def parity_groups(nodes: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """Return the groups of ranks that share parity; `nodes` has the node of each rank.

    The members of a group are on different nodes, and have the same number on their node. No group
    has more than `size` members or fewer than 2; only of 3 nodes with size 2 all three form one.
    Raises UsageError for one node, and for nodes with different numbers of ranks.
    """
    if size < 2:
        raise UsageError(f"group={size}: parity needs groups of 2 nodes or more")
    of_node: dict[int, list[int]] = defaultdict(list)
    for rank, node in enumerate(nodes):
        of_node[node].append(rank)
    if len(of_node) < 2:
        raise UsageError(f"parity needs 2 nodes or more, this job has {len(of_node)}")
    counts = sorted({len(ranks) for ranks in of_node.values()})
    if len(counts) > 1:
        raise UsageError(
            f"parity needs the same number of ranks on every node, this job has {counts}; "
            "use Partner()"
        )
    numbers = sorted(of_node)
    groups = []
    for chosen in _split(numbers, size):
        groups += [tuple(of_node[node][local] for node in chosen) for local in range(counts[0])]
    return groups


def _split(nodes: list[int], size: int) -> list[list[int]]:
    """Split `nodes` into consecutive groups, whose sizes differ by 1 at most."""
    count = min(-(-len(nodes) // size), len(nodes) // 2)
    ends = [len(nodes) * number // count for number in range(count + 1)]
    return [nodes[start:stop] for start, stop in itertools.pairwise(ends)]


def chunk_bytes(size_bytes: int, members: int) -> int:
    """Return the length of one chunk of a member's data: 1/(members - 1) of it, in whole pieces."""
    chunk = -(-size_bytes // (members - 1))
    return -(-chunk // PIECE) * PIECE


def chunk_of(member: int, holder: int) -> int:
    """Return which chunk of `member` is part of the parity that `holder` keeps.

    Both are positions in the group, and differ. The parity is rotated: every member keeps parity of
    all others' data and of none of its own (SCR, scheme XOR).
    """
    return holder if holder < member else holder - 1
