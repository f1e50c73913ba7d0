"""World: this process among the ranks of a job, found from the launcher's variables."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from iobench.errors import OptionError, UsageError

OWN = "iobench"
"""The launcher of ranks that a run of iobench starts itself, on its own machine."""


@dataclass(frozen=True, kw_only=True)
class World:
    """The position of this process among the ranks of one job.

    `rank` counts from 0 to `size` - 1, `local_rank` to `local_size` - 1 on its node, and `node` to
    `nodes` - 1. `job` is the same text in all ranks and another one after a restart of the job.
    `launcher` is torchrun, slurm, mpi, iobench (OWN), or none for a process without ranks. `master`
    is the address at which the launcher lets the ranks meet, if it names one. Without `placed` the
    launcher does not say which ranks share a node: the places are a guess until `on` is given the
    node of each rank.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    host: str
    job: str
    launcher: str
    master: str | None = None
    placed: bool = True

    def __post_init__(self) -> None:
        for name, value, count in (
            ("rank", self.rank, self.size),
            ("local rank", self.local_rank, self.local_size),
            ("node", self.node, self.nodes),
        ):
            if not 0 <= value < count:
                raise UsageError(
                    f"{name} {value} of {count}: the variables of the launcher "
                    f"({self.launcher}) contradict each other"
                )

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size} (host {self.host})"

    @property
    def on_one_node(self) -> bool:
        """Whether no rank is on another node, so that they may meet at the loopback."""
        if self.master is not None and is_loopback(self.master):
            return True
        return self.nodes == 1 and (self.placed or self.master is None)

    def same_rank(self, other: World) -> bool:
        """Whether both are the same rank of the same job, wherever its ranks are."""
        return (self.job, self.rank, self.size) == (other.job, other.rank, other.size)

    def on(self, nodes: Sequence[int]) -> World:
        """Return this world with the places that follow from the node of each rank."""
        own = nodes[self.rank]
        return replace(
            self,
            local_rank=nodes[: self.rank].count(own),
            local_size=nodes.count(own),
            node=own,
            nodes=len(set(nodes)),
            placed=True,
        )

    @classmethod
    def single(cls) -> World:
        """Return the world of one process without a launcher."""
        return cls(
            rank=0,
            size=1,
            local_rank=0,
            local_size=1,
            node=0,
            nodes=1,
            host=socket.gethostname(),
            job=f"{os.getpid()}",
            launcher="none",
        )

    @classmethod
    def of(cls, world: AnyWorld) -> World:
        """Return the world that the option `world` means: `"job"`, `"alone"`, or the world itself.

        Raises OptionError for anything else, UsageError for variables that contradict each other.
        """
        if isinstance(world, World):
            return world
        if world == "alone":
            return cls.single()
        if world == "job":
            return cls.detect()
        raise OptionError(f"world={world!r}: 'job' for all ranks of the job, or 'alone'")

    @classmethod
    def detect(cls, environ: Mapping[str, str] | None = None) -> World:
        """Return the world that the launcher's variables describe; one process without any.

        torchrun's variables come first, then those of Slurm's `srun`, then those of Open MPI,
        MPICH, Intel MPI and Cray's PALS. Raises UsageError for variables that contradict each
        other or are not numbers.
        """
        found = os.environ if environ is None else environ
        for names in _LAUNCHERS:
            if names.rank in found and names.size in found:
                return names.world(found)
        return cls.single()


AnyWorld = World | Literal["job", "alone"]
"""What an option `world` takes: all ranks of the launcher's job, this process alone, or a world."""


@dataclass(frozen=True, kw_only=True)
class _Names:
    """The variables of one launcher."""

    launcher: str
    rank: str
    size: str
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    node: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    job: tuple[str, ...] = ()

    def world(self, found: Mapping[str, str]) -> World:
        rank, size = _number(found, self.rank), _number(found, self.size)
        local_rank = _first_number(found, self.local_rank)
        local_size = _first_number(found, self.local_size)
        node, nodes = _first_number(found, self.node), _first_number(found, self.nodes)
        if local_size is None and self.launcher == "slurm" and node is not None:
            local_size = _tasks_of(node, found)
        placed = local_size is not None or nodes is not None
        if self.launcher == "mpi":  # no node has a number, and neighbours may be on other nodes
            placed = local_size == size
        if local_size is None:
            local_size = size if nodes in (None, 1) else -(-size // (nodes or 1))
        if local_rank is None:
            local_rank = rank % local_size
        if node is None:  # ranks are numbered node by node, unless the user asked for another order
            node = (rank - local_rank) // local_size
        if nodes is None:
            nodes = max(node + 1, -(-size // local_size))
        job = ".".join(found[name] for name in self.job if found.get(name))
        return World(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            node=node,
            nodes=nodes,
            host=socket.gethostname(),
            job=job or self.launcher,
            launcher=self.launcher,
            master=found.get("MASTER_ADDR") or _first_host(found, self.launcher),
            placed=placed,
        )


_LAUNCHERS = (
    _Names(
        launcher="torchrun",
        rank="RANK",
        size="WORLD_SIZE",
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),  # DeepSpeed's launcher has the second names
        node=("GROUP_RANK", "CROSS_RANK"),
        job=("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT"),
    ),
    _Names(
        launcher="slurm",
        rank="SLURM_PROCID",
        # Of the step, which only srun makes: a batch script has SLURM_NTASKS, but is no rank.
        size="SLURM_STEP_NUM_TASKS",
        local_rank=("SLURM_LOCALID",),
        node=("SLURM_NODEID",),
        nodes=("SLURM_STEP_NUM_NODES",),
        job=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    ),
    _Names(
        launcher="mpi",
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    _Names(
        launcher="mpi",
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        job=("PMI_JOBID", "PALS_APID"),
    ),
)


def is_loopback(host: str) -> bool:
    """Return whether `host` is an address of the loopback, or its name."""
    return host == "localhost" or host.startswith("127.")


def _number(found: Mapping[str, str], name: str) -> int:
    try:
        return int(found[name])
    except ValueError:
        raise UsageError(f"{name}={found[name]!r} in the environment: must be a number") from None


def _first_number(found: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    return next((_number(found, name) for name in names if name in found), None)


def _tasks_of(node: int, found: Mapping[str, str]) -> int | None:
    """Return the number of tasks on `node`; Slurm writes `4(x2),3` for nodes with 4, 4 and 3."""
    counts: list[int] = []
    for part in found.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match:
            counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node < len(counts) else None


def _first_host(found: Mapping[str, str], launcher: str) -> str | None:
    """Return the first host of Slurm's list: `node[03-07,9],other` gives `node03`."""
    listed = found.get("SLURM_STEP_NODELIST") or found.get("SLURM_JOB_NODELIST")
    if launcher != "slurm" or not listed:
        return None
    match = re.match(r"([^,\[]+)(?:\[(\d+))?", listed)
    return f"{match[1]}{match[2] or ''}" if match else None
