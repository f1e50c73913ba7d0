"""`iobench` in several ranks: real processes with the variables of a launcher."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from support.ranks import Ranks, free_port, running


def slurm(rank: int, size: int, job: str) -> dict[str, str]:
    """The variables of `srun` for ranks on nodes of their own."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(rank),
        "SLURM_STEP_NUM_NODES": str(size),
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{size})",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": "0",
    }


_ELSEWHERE = """
import ctypes, subprocess, sys
assert ctypes.CDLL(None).unshare(0x20000) == 0  # CLONE_NEWNS
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "--bind", sys.argv[1], "/proc/sys/kernel/random/boot_id"], check=True)
sys.argv = ["iobench", *sys.argv[2:]]
from iobench.__main__ import run
run()
"""
"""A process that sees another kernel's id, as on another machine. Only root may do that."""


_IN_NODE = """
import sys
from support.preloaded import enter
enter(int(sys.argv[1]), "net")
enter(int(sys.argv[1]), "uts")
sys.argv = ["iobench", *sys.argv[2:]]
from iobench.__main__ import run
run()
"""
"""A process with the network and the host name of a node of support.nodes."""


@contextlib.contextmanager
def rank_commands(
    arguments: Sequence[str | Path],
    environments: Sequence[Mapping[str, str]],
    cwd: Path,
    *,
    machines: bool = False,
    nodes: Sequence[int] = (),
) -> Iterator[Ranks]:
    """Start `iobench ARGUMENTS` with each of the environments.

    With `machines`, each rank seems to be on a machine of its own. `nodes`: the node of each rank,
    as the pid of a process in it.
    """
    programs = []
    for rank, own in enumerate(environments):
        program = ["-m", "iobench"]
        if machines:
            boot = cwd / f"boot-{rank}"
            boot.write_text(f"{rank}\n")
            program = ["-c", _ELSEWHERE, str(boot)]
        if nodes:
            program = ["-c", _IN_NODE, str(nodes[rank])]
        programs.append(([*program, *arguments], {"OMP_NUM_THREADS": "1", **own}))
    with running(programs, cwd=cwd) as ranks:
        yield ranks


def job_number() -> str:
    """Return a number that no other job of this machine has now."""
    return str(free_port())
