"""Members: the ranks of a run as rank 0 knows them: their nodes, machines, clocks and sources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from iobench._version import __version__
from iobench.errors import UsageError
from iobench.ranks.control import Control
from iobench.results.records import WorldFacts
from iobench.units import count_of, format_seconds

SETUP_S = 600.0
"""How long a rank may take for its set-up: imports, a plan, memory for its data."""
OPERATION_S = 24 * 3600.0
"""How long one operation may take. A rank that ends, stops or is cut off is known much sooner."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def introduce(control: Control) -> Members | None:
    """Exchange the facts of all ranks. Returns them in rank 0, and None in the others."""
    machine, clock = _BOOT_ID.read_text().strip(), control.clock_offset()
    own = [machine, __version__, clock.offset_s, clock.error_s]
    found = control.gather("facts of the ranks", own, deadline_s=SETUP_S)
    if not control.leads:
        return None
    machines, versions, offsets_s, errors_s = map(tuple, zip(*found, strict=True))
    others = {*versions} - {__version__}
    if others:
        raise UsageError(
            f"rank 0 has iobench {__version__}, other ranks have {', '.join(sorted(others))}; "
            "install the same version on all nodes"
        )
    nodes = tuple(control.nodes)
    facts = WorldFacts(
        launcher=control.world.launcher,
        size=len(nodes),
        nodes=len(set(nodes)),
        hosts=tuple(control.hosts),
        node=nodes,
        interface=None if control.interface is None else str(control.interface),
        restored_from=tuple(sources_of(nodes)),
        clock_offset_s=offsets_s,
        clock_error_s=errors_s,
    )
    return Members(facts=facts, machines=machines)


@dataclass(frozen=True, kw_only=True)
class Members:
    """All ranks of the run: their facts for the record, and the machine of each.

    A machine is a running kernel, which several nodes may share.
    """

    facts: WorldFacts
    machines: Sequence[str]
    replicas: bool = False
    """Whether all ranks restore what rank 0 saved."""

    def as_replicas(self) -> Members:
        """Return them as ranks that all restore what rank 0 saved."""
        facts = replace(self.facts, restored_from=(0,) * self.facts.size)
        return replace(self, facts=facts, replicas=True)

    @cached_property
    def first_of_machine(self) -> list[int]:
        """The first rank of each machine; rank 0 is one of them."""
        return [self.machines.index(one) for one in dict.fromkeys(self.machines)]

    @property
    def restore_note(self) -> str:
        """Return who restores what its own node wrote; empty if nobody does."""
        same = same_node(self.facts.node, self.facts.restored_from)
        if not same:
            return ""
        if self.facts.nodes == 1 and not self.replicas:
            return "all ranks are on one node: each restores what it wrote itself"
        ranks = count_of(len(same), "rank")
        return f"{ranks} of {self.facts.size} restored what their own node wrote"

    def lines(self) -> list[str]:
        """Return the lines on the ranks, for a plan."""
        hosts = list(dict.fromkeys(self.facts.hosts))
        shown = ", ".join(hosts[:4]) + (", ..." if len(hosts) > 4 else "")
        within = format_seconds(max(self.facts.clock_error_s))
        lines = [
            f"nodes     {self.facts.nodes} ({shown}), started by {self.facts.launcher}",
            f"clocks    compared with rank 0's, within {within}",
        ]
        if self.facts.interface:
            lines.insert(1, f"network   {self.facts.interface}")
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
