"""World: each launcher's variables."""

from __future__ import annotations

from pathlib import Path

import pytest

import iobench
from iobench.errors import OptionError, UsageError
from iobench.ranks.world import World


def _variables(text: str) -> dict[str, str]:
    return dict(one.split("=") for one in text.split())


_TORCHRUN = _variables(
    "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 MASTER_ADDR=node0 "
    "MASTER_PORT=29500 TORCHELASTIC_RUN_ID=a TORCHELASTIC_RESTART_COUNT=2"
)
_SLURM = _variables(
    "SLURM_PROCID=9 SLURM_STEP_NUM_TASKS=11 SLURM_LOCALID=1 SLURM_NODEID=2 SLURM_STEP_NUM_NODES=3 "
    "SLURM_STEP_TASKS_PER_NODE=4(x2),3 SLURM_STEP_NODELIST=gpu[03-07,9],other SLURM_JOB_ID=77 "
    "SLURM_STEP_ID=0"
)
_OPEN_MPI = _variables(
    "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 "
    "OMPI_COMM_WORLD_LOCAL_SIZE=2"
)
_DEEPSPEED = _variables(
    "RANK=8 WORLD_SIZE=16 LOCAL_RANK=0 LOCAL_SIZE=8 CROSS_RANK=1 CROSS_SIZE=2 MASTER_ADDR=node0 "
    "MASTER_PORT=29500"
)
_MPICH = _variables("PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2")


def _place(world: World) -> tuple[int, ...]:
    return (
        *(world.rank, world.size, world.local_rank, world.local_size),
        *(world.node, world.nodes),
    )


@pytest.mark.parametrize(
    ("found", "launcher", "place"),
    [
        (_TORCHRUN, "torchrun", (5, 8, 1, 4, 1, 2)),
        (_SLURM, "slurm", (9, 11, 1, 3, 2, 3)),
        (_OPEN_MPI, "mpi", (3, 4, 1, 2, 1, 2)),
        (_MPICH, "mpi", (3, 4, 1, 2, 1, 2)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "torchrun", (1, 2, 1, 2, 0, 1)),
        (_DEEPSPEED, "torchrun", (8, 16, 0, 8, 1, 2)),
        # Kubernetes and Ray Train set torchrun's variables, and srun's may be there too.
        ({**_SLURM, **_TORCHRUN}, "torchrun", (5, 8, 1, 4, 1, 2)),
        # A batch script of Slurm is no rank, although it has a job and a number of tasks.
        (
            {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
            "none",
            (0, 1, 0, 1, 0, 1),
        ),
        ({}, "none", (0, 1, 0, 1, 0, 1)),
    ],
)
def test_launchers(found: dict[str, str], launcher: str, place: tuple[int, ...]) -> None:
    """The variables of each launcher give rank, local rank and node."""
    world = World.detect(found)
    assert (world.launcher, _place(world)) == (launcher, place)


def test_a_launcher_that_names_no_nodes() -> None:
    """Without the number of local ranks, places follow from the nodes, once the ranks have met."""
    kubeflow = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "worker-0"}
    world = World.detect(kubeflow)
    assert not world.placed
    assert not world.on_one_node
    assert World.detect({**kubeflow, "MASTER_ADDR": "127.0.0.1"}).on_one_node
    assert World.detect({"RANK": "1", "WORLD_SIZE": "2"}).on_one_node
    found = world.on([0, 1, 1, 0])
    assert (_place(found), found.placed) == ((2, 4, 1, 2, 1, 2), True)
    assert found.same_rank(world)


def test_ranks_that_go_round_the_nodes() -> None:
    """`mpirun --map-by node`: the neighbour of a rank is on another node, as the hosts show."""
    found = {**_OPEN_MPI, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    second = World.detect(found)
    assert not second.placed
    assert _place(second.on([0, 1, 0, 1])) == (1, 4, 0, 2, 1, 2)
    one_node = {**_OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
    assert World.detect(one_node).placed


def test_jobs_and_hosts() -> None:
    """Ranks of an earlier start have another job name. Slurm's rank 0 is on the first host of the
    list."""
    again = {**_TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "3"}
    assert World.detect(_TORCHRUN).job != World.detect(again).job
    assert World.detect(_TORCHRUN).job == World.detect({**_TORCHRUN, "RANK": "0"}).job
    hosts = {"gpu[03-07,9],other": "gpu03", "a1,b2": "a1", "login": "login", "n[4]": "n4"}
    for listed, first in hosts.items():
        assert World.detect({**_SLURM, "SLURM_STEP_NODELIST": listed}).master == first


@pytest.mark.parametrize(
    "broken", [{"RANK": "8"}, {"RANK": "-1"}, {"WORLD_SIZE": "many"}, {"LOCAL_RANK": "4"}]
)
def test_contradictions_are_refused(broken: dict[str, str]) -> None:
    """Numbers that cannot be are an error of the user's environment."""
    with pytest.raises(UsageError):
        World.detect({**_TORCHRUN, **broken})


def test_the_option_world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`job` is that of the launcher, `alone` is this process only, one rank of a job that saves
    without the others; a World is taken as it is."""
    for name, value in _TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert World.of("job") == World.detect(_TORCHRUN)
    assert World.of("alone").size == 1
    assert World.of(World.detect(_SLURM)) == World.detect(_SLURM)
    with pytest.raises(OptionError, match="world='all': 'job' for all ranks of the job, or"):
        World.of("all")  # type: ignore[arg-type]  # what a user may write
    with iobench.Checkpointer(tmp_path / "a", world="alone") as ckpt:
        ckpt.save({"step": 3}, 3)
        assert ckpt.load() == {"step": 3}
