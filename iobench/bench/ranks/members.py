"""Members: the ranks of a run as rank 0 knows them: their nodes, machines, clocks and sources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from iobench._version import __version__
from iobench.bench.plan import WorldSize
from iobench.errors import UsageError
from iobench.ranks.control import ClockOffset, Control
from iobench.results.codec import from_plain, to_plain
from iobench.results.records import WorldFacts
from iobench.units import count_of, format_seconds

SETUP_S = 600.0
"""How long a rank may take for its set-up: imports, a plan, memory for its data."""
OPERATION_S = 24 * 3600.0
"""How long one operation may take. A rank that ends, stops or is cut off is known much sooner."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """One rank. `machine` identifies the running kernel, which several nodes may share."""

    host: str
    node: int
    local_size: int
    machine: str
    version: str
    clock: ClockOffset


def introduce(control: Control) -> Members | None:
    """Exchange the facts of all ranks. Returns them in rank 0, and None in the others."""
    world = control.world
    own = RankFacts(
        host=world.host,
        node=world.node,
        local_size=world.local_size,
        machine=_BOOT_ID.read_text().strip(),
        version=__version__,
        clock=control.clock_offset(),
    )
    found = control.gather("facts of the ranks", to_plain(own), deadline_s=SETUP_S)
    if world.rank:
        return None
    members = [from_plain(RankFacts, one) for one in found]
    others = {one.version for one in members} - {__version__}
    if others:
        raise UsageError(
            f"rank 0 has iobench {__version__}, other ranks have {', '.join(sorted(others))}; "
            "install the same version on all nodes"
        )
    interface = None if control.interface is None else str(control.interface)
    return Members(members=members, launcher=world.launcher, interface=interface)


@dataclass(frozen=True, kw_only=True)
class Members:
    """All ranks of the run, in rank order."""

    members: Sequence[RankFacts]
    launcher: str
    interface: str | None
    replicas: bool = False
    """Whether all ranks restore what rank 0 saved."""

    @property
    def size(self) -> int:
        return len(self.members)

    @cached_property
    def nodes(self) -> list[int]:
        """The node of each rank."""
        return [one.node for one in self.members]

    @property
    def node_count(self) -> int:
        return len(set(self.nodes))

    @property
    def world(self) -> WorldSize:
        """The ranks as a plan needs them: their number, and the most on one node."""
        return WorldSize(size=self.size, local=max(Counter(self.nodes).values()))

    @cached_property
    def sources(self) -> list[int]:
        """The rank whose files each rank restores."""
        return [0] * self.size if self.replicas else sources_of(self.nodes)

    @cached_property
    def first_of_machine(self) -> list[int]:
        """The first rank of each machine; rank 0 is one of them."""
        machines = [one.machine for one in self.members]
        return [machines.index(one) for one in dict.fromkeys(machines)]

    def away(self, rank: int) -> bool:
        """Whether the rank is on another machine than rank 0."""
        return self.members[rank].machine != self.members[0].machine

    def named(self, rank: int) -> str:
        """Return `rank 5 (host b)`."""
        return f"rank {rank} (host {self.members[rank].host})"

    @property
    def restore_note(self) -> str:
        """Return who restores what its own node wrote; empty if nobody does."""
        same = same_node(self.nodes, self.sources)
        if not same:
            return ""
        if self.node_count == 1 and not self.replicas:
            return "all ranks are on one node: each restores what it wrote itself"
        return f"{count_of(len(same), 'rank')} of {self.size} restored what their own node wrote"

    def facts(self) -> WorldFacts:
        """Return the ranks for the record."""
        return WorldFacts(
            launcher=self.launcher,
            size=self.size,
            nodes=self.node_count,
            hosts=tuple(one.host for one in self.members),
            node=tuple(self.nodes),
            interface=self.interface,
            restored_from=tuple(self.sources),
            clock_offset_s=tuple(one.clock.offset_s for one in self.members),
            clock_error_s=tuple(one.clock.error_s for one in self.members),
        )

    def lines(self) -> list[str]:
        """Return the lines on the ranks, for a plan."""
        hosts = list(dict.fromkeys(one.host for one in self.members))
        shown = ", ".join(hosts[:4]) + (", ..." if len(hosts) > 4 else "")
        error_s = max(one.clock.error_s for one in self.members)
        lines = [
            f"nodes     {self.node_count} ({shown}), started by {self.launcher}",
            f"clocks    compared with rank 0's, within {format_seconds(error_s)}",
        ]
        if self.interface:
            lines.insert(1, f"network   {self.interface}")
        return lines


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
