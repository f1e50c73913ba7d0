"""Sources: whose checkpoint each rank restores, so that no page cache can have it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

__all__ = ["same_node", "sources_of"]


def sources_of(nodes: Sequence[int]) -> list[int]:
    """Return for each rank the rank whose files it restores; `nodes` has the node of each rank.

    Every rank is the source of one other. The ranks are shifted by the largest number of ranks on
    one node, node by node. So each reads what another node wrote, unless one node has more than
    half of the ranks. With one node, each rank restores its own files.
    """
    ranks = sorted(range(len(nodes)), key=lambda rank: (nodes[rank], rank))
    shift = max(Counter(nodes).values(), default=0)
    found = list(range(len(nodes)))
    for position, rank in enumerate(ranks):
        found[rank] = ranks[(position + shift) % len(ranks)]
    return found


def same_node(nodes: Sequence[int], sources: Sequence[int]) -> list[int]:
    """Return the ranks that restore what their own node wrote."""
    return [rank for rank, source in enumerate(sources) if nodes[rank] == nodes[source]]
