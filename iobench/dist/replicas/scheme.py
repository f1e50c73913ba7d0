"""Partner and Xor: where the bytes of a rank go besides the agent of its own node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from iobench.dist.replicas.placement import parity_groups, partner_nodes
from iobench.dist.replicas.segment import Key
from iobench.errors import OptionError
from iobench.units import parse_seconds, parse_size

__all__ = ["PaceOptions", "Partner", "Scheme", "Xor"]


@dataclass(frozen=True, kw_only=True)
class PaceOptions:
    """Options that both schemes have.

    - `share`: of the network's rate, as measured at the start, that a node may use for replicas
    - `rate`: bytes per second of a node (`"500MiB"`) in place of the measured share
    - `memory`: bytes that the agent of a node may take (`"64GiB"`); None: what is available, less
      1 GiB
    - `keep`: how long the agent of a node waits for the ranks of a restart before it ends (`"1h"`)
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


class Scheme(Protocol):
    """A way to protect the bytes of ranks against the loss of nodes."""

    @property
    def pace(self) -> PaceOptions:
        """The options."""

    def targets(self, nodes: Sequence[int]) -> list[list[tuple[Key, int]]]:
        """Return, for each rank, the segments that get its bytes, and their nodes.

        `nodes` has the node of each rank. Raises UsageError when the nodes do not allow it.
        """


@dataclass(frozen=True, kw_only=True)
class Partner(PaceOptions):
    """A whole copy on another node: survives the loss of nodes that are not partners.

    Memory of a node: four times the bytes of its ranks, for two versions of its own and two of its
    partner's.
    """

    @property
    def pace(self) -> PaceOptions:
        """The options."""
        return self

    def targets(self, nodes: Sequence[int]) -> list[list[tuple[Key, int]]]:
        """Return, for each rank, the segments that get its bytes; see Scheme."""
        numbers = sorted(set(nodes))
        partner = dict(zip(numbers, partner_nodes(len(numbers)), strict=True))
        return [[(Key((rank,)), numbers[partner[node]])] for rank, node in enumerate(nodes)]


@dataclass(frozen=True, kw_only=True)
class Xor(PaceOptions):
    """Parity over groups of at most `group` nodes: survives the loss of one node of each group.

    Memory of a node: twice the bytes of its ranks for two versions of its own, and 2/(group - 1) of
    them for parity.
    """

    group: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.group) is not int or self.group < 2:
            raise OptionError(f"group={self.group!r}: a whole number, 2 or more")

    @property
    def pace(self) -> PaceOptions:
        """The options."""
        return self

    def targets(self, nodes: Sequence[int]) -> list[list[tuple[Key, int]]]:
        """Return, for each rank, the segments that get its bytes; see Scheme."""
        found: list[list[tuple[Key, int]]] = [[] for _ in nodes]
        for members in parity_groups(nodes, self.group):
            for position, rank in enumerate(members):
                found[rank] = [
                    (Key(members, holder), nodes[other])
                    for holder, other in enumerate(members)
                    if holder != position
                ]
        return found
