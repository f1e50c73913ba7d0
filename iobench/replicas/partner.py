"""Partner: each node keeps a copy of the bytes of another node's ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from iobench.errors import OptionError, UsageError
from iobench.units import parse_seconds, parse_size


@dataclass(frozen=True, kw_only=True)
class Partner:
    """A whole copy on another node: survives the loss of nodes that are not partners.

    Memory of a node: four times the bytes of its ranks, for two versions of its own and two of its
    partner's.

    - `share`: of the network's rate, as measured at the start, that a node may use for replicas
    - `rate`: bytes per second of a node (`"500MiB"`) in place of the measured share
    - `memory`: bytes that the replicas of a job may take on a node (`"64GiB"`); None: what is
      available, less 1 GiB
    - `keep`: how long replicas of a job that does not come back stay; after that the next start of
      a job with replicas removes them (`"1h"`)
    """

    share: float = 0.2
    rate: int | str | None = None
    memory: int | str | None = None
    keep: float | str = "1h"

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise OptionError(f"share={self.share!r}: more than 0, at most 1")
        if self.rate_bytes_per_s == 0:
            raise OptionError("rate=0: must be at least 1 byte per second")
        if self.memory is not None:
            parse_size(self.memory, "memory")
        parse_seconds(self.keep, "keep")

    @property
    def rate_bytes_per_s(self) -> int | None:
        """The given rate; None for a measured share."""
        return None if self.rate is None else parse_size(self.rate, "rate")

    @property
    def budget_bytes(self) -> int | None:
        """The given limit of memory."""
        return None if self.memory is None else parse_size(self.memory, "memory")

    @property
    def keep_s(self) -> float:
        """`keep` in seconds."""
        return parse_seconds(self.keep, "keep")

    def receivers(self, nodes: Sequence[int]) -> list[int]:
        """Return the rank that keeps the copy of each rank; `nodes` has the node of each rank.

        Empty for one node.
        """
        numbers = sorted(set(nodes))
        if len(numbers) < 2:
            return []
        partner = dict(zip(numbers, partner_nodes(len(numbers)), strict=True))
        members = {one: [rank for rank, node in enumerate(nodes) if node == one] for one in numbers}
        found = []
        for rank, node in enumerate(nodes):
            others = members[numbers[partner[node]]]
            found.append(others[members[node].index(rank) % len(others)])
        return found


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
