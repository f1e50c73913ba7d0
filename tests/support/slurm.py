"""A real Slurm on this machine: its controller and one node, for `srun`. Needs root."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from support.captured import captured
from support.ranks import free_port

_READY_S = 30.0

_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CryptoType=crypto/munge
SlurmctldPort={controller}
SlurmdPort={node}
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES OverSubscribe=FORCE MaxTime=INFINITE State=UP
"""


_MUNGE_FILES = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}


def slurm_lacks() -> str | None:
    """What `open_slurm` and its users need and this machine has not; None if it has all."""
    if not all(map(_program, ("munged", "slurmctld", "slurmd", "srun", "sinfo"))):
        return "Slurm's daemons or srun are not installed"
    if not os.path.ismount("/sys/fs/cgroup"):
        return "slurmd needs control groups: nothing is mounted on /sys/fs/cgroup"
    return None


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


@contextmanager
def open_slurm(directory: Path) -> Iterator[dict[str, str]]:
    """Start the daemons, with their files in `directory`; yield the environment for `srun`.

    Raises AssertionError with what the daemons printed if the node does not become idle.
    """
    directory.chmod(0o755)
    for name in ("state", "spool"):
        (directory / name).mkdir()
    (key := directory / "munge.key").write_bytes(os.urandom(128))
    key.chmod(0o400)
    configuration = directory / "slurm.conf"
    text = _CONFIGURATION.format(
        host=socket.gethostname().partition(".")[0],
        directory=directory,
        controller=free_port(),
        node=free_port(),
        cpus=os.cpu_count(),
    )
    configuration.write_text(text)
    environment = {**os.environ, "SLURM_CONF": str(configuration)}
    munged = (
        *("munged", "--foreground", "--force", "--num-threads=1", f"--key-file={key}"),
        *(f"--{name}={directory}/munge.{end}" for name, end in _MUNGE_FILES.items()),
    )
    with ExitStack() as stack:
        for command in (munged, ("slurmctld", "-D"), ("slurmd", "-D")):
            stack.enter_context(_daemon(command, directory, environment))
        _wait_until_idle(directory, environment)
        yield environment


@contextmanager
def _daemon(
    command: tuple[str, ...], directory: Path, environment: dict[str, str]
) -> Iterator[None]:
    program = _program(command[0])
    assert program is not None
    with (directory / f"{command[0]}.out").open("wb") as out:
        process = subprocess.Popen(
            [program, *command[1:]],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_idle(directory: Path, environment: dict[str, str]) -> None:
    until_s = time.monotonic() + _READY_S
    while time.monotonic() < until_s:
        asked = captured(["sinfo", "--noheader", "-o", "%T"], env=environment)
        if asked.stdout.strip() == "idle":
            return
        time.sleep(0.1)
    printed = {one.name: one.read_text()[-2000:] for one in directory.glob("*.out")}
    raise AssertionError(f"no idle node: {asked.stdout} {asked.stderr} {printed}")
