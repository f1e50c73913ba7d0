"""Nodes of a cluster on one machine: Linux namespaces, joined by a bridge. Needs root.

A node has its own network (eth0 with an address), host name, mounts (/dev/shm), and processes.

    with open_nodes(2, directory=directory) as nodes:
        job = nodes.ranks("support.script:main", per_node=1)
        job[0].kill()
        assert job[1].wait(30) == 1
        assert "rank 0" in job[1].stderr()

No namespace has a name. A node is held by one process that reads a pipe from this process. When
this process ends, however it ends, the pipe closes; the kernel then kills all processes of the node
and removes its devices and mounts. Nothing is left to be removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from support.captured import captured
from support.filesystems import chroot
from support.preloaded import Preloaded, run_preloaded
from support.ranks import torchrun_variables

_LIMIT_S = 120
"""A process that runs longer prints its stacks and exits with 1."""

_CALL = """
import faulthandler, importlib, json, sys
from support.kill_points import arm
limit_s, points, target, arguments = json.loads(sys.argv[1])
faulthandler.dump_traceback_later(limit_s, exit=True)
for point in points:
    arm(point)
module, _, name = target.partition(":")
getattr(importlib.import_module(module), name)(*arguments)
"""

_HOLD = (
    # The first word of /proc/self/stat is the pid outside: /proc is still that of the parent.
    "read -r pid _ < /proc/self/stat && mount -t proc proc /proc && {setup} && echo $pid "
    "&& read -r _"  # until the pipe is closed; bash reaps the orphans of its namespace
)
_UNSHARE = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child"]


@contextmanager
def open_nodes(count: int, *, directory: Path) -> Iterator[Nodes]:
    """Yield `count` nodes. At the end every process in them is killed.

    Output of processes is stored in `directory`. Skips the test where nodes cannot be made.
    """
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if found := chroot():
        pytest.skip(found)
    for program in ("unshare", "nsenter", "ip", "bash"):
        if not shutil.which(program):
            pytest.skip(f"{program} is not installed (util-linux, iproute2)")
    run_preloaded(["-c", "pass"])  # its server is there before anything is counted
    with ExitStack() as stack:
        try:
            life = stack.enter_context(_pipe())
            switch = stack.enter_context(_holder(life, "ip link add bridge type bridge"))
            _ip(switch, "link set bridge up")
        except OSError as error:
            pytest.skip(f"no network namespace can be made here: {error}")
        nodes = Nodes(count, life, switch, directory, stack)
        stack.callback(nodes._end)
        yield nodes


class Nodes(Sequence["Node"]):
    """The nodes and their processes."""

    def __init__(
        self, count: int, life: int, switch: int, directory: Path, stack: ExitStack
    ) -> None:
        self._directory, self._stack = directory, stack
        self._life, self._hosts = life, directory / "hosts"
        lines = [f"{_address(i)} node{i}\n" for i in range(count)]
        self._hosts.write_text("127.0.0.1 localhost\n" + "".join(lines), "utf-8")
        self._nodes = [Node(self, switch, number) for number in range(count)]
        self._port = 29500
        self._processes: list[Process] = []
        for node in self._nodes:
            node.boot()

    def __len__(self) -> int:
        return len(self._nodes)

    def __getitem__(self, number: Any) -> Any:
        return self._nodes[number]

    def ranks(
        self,
        target: str,
        *arguments: Any,
        per_node: int = 1,
        order: Sequence[int] | None = None,
        environ: Mapping[str, str] | None = None,
        points: Mapping[int, Sequence[str]] | None = None,
        job: str | None = None,
        port: int | None = None,
        restart: int = 0,
    ) -> list[Process]:
        """Start one process a rank, with torchrun's variables; return them in rank order.

        `order`: the number of the node of each group of `per_node` ranks. `points`: kill points of
        a rank (see support.kill_points). `environ`: more variables. `target`: "module:function",
        called with `arguments`. Every job gets its own port and run id.
        """
        self._port += 10
        port = port or self._port
        order = list(range(len(self))) if order is None else list(order)
        first = self[order[0]].address
        more = {
            "GROUP_WORLD_SIZE": len(order),
            "TORCHELASTIC_RUN_ID": job or f"job-{port}",
            "TORCHELASTIC_RESTART_COUNT": restart,
            "TORCHELASTIC_MAX_RESTARTS": 3,
            # torchrun's agent, whose store has both, does not run here.
            "IOBENCH_STORE": f"tcp://{first}:{port + 1}",
            "IOBENCH_TOKEN": "secret",
            **(environ or {}),
        }
        groups = [rank // per_node for rank in range(len(order) * per_node)]
        started = []
        for rank, own in enumerate(torchrun_variables(groups, port, first, **more)):
            process = self[order[groups[rank]]].start(
                target,
                *arguments,
                environ=own,
                points=(points or {}).get(rank, ()),
            )
            process.rank = rank
            started.append(process)
        return started

    def wait(self, processes: Sequence[Process], timeout_s: float) -> list[int]:
        """Wait until all have ended; return their exit codes (-9: killed by SIGKILL).

        Raises TimeoutError with the output of those that still run.
        """
        end_s = time.monotonic() + timeout_s
        while any(process.code is None for process in processes):
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                shown = [f"{p}:\n{p.stdout()}{p.stderr()}" for p in processes if p.code is None]
                raise TimeoutError(f"still running after {timeout_s} s: " + "\n".join(shown))
            time.sleep(0.005)
        return [process.code for process in processes if process.code is not None]

    def kill_all(self) -> None:
        """Kill every process of every node, also those that the ranks have left."""
        for node in self._nodes:
            for pid in node.running():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.wait(self._processes, 60)

    def shown(self, count: int) -> str:
        """Return the output of the `count` processes that were started last."""
        return "\n".join(f"{p}:\n{p.stdout()}{p.stderr()}" for p in self._processes[-count:])

    def forget(self) -> None:
        """Remove the output of all processes, which have ended."""
        self._processes.clear()
        for file in self._directory.glob("process-*"):
            file.unlink()

    def _end(self) -> None:
        """Kill what still runs, and wait for it."""
        for process in self._processes:
            process.kill()
        self.wait(self._processes, 60)


class Node:
    """One node: its processes, its link, its mounts."""

    def __init__(self, nodes: Nodes, switch: int, number: int) -> None:
        self._nodes, self._switch, self.number = nodes, switch, number
        self.host, self.address = f"node{number}", _address(number)
        self._held = ExitStack()
        nodes._stack.push(self._held)
        self.pid = 0

    def boot(self) -> None:
        """Make the namespaces, with an empty /dev/shm and the link up."""
        setup = (
            f"hostname {self.host} && ip link set lo up && mount -t tmpfs shm /dev/shm"
            f" && mount --bind {self._nodes._hosts} /etc/hosts"
        )
        self.pid = self._held.enter_context(_holder(self._nodes._life, setup))
        port = f"port{self.number}"
        # The same hardware address after each boot: the other nodes remember it for a minute.
        address = f"address 02:00:00:00:00:{self.number:02x}"
        _ip(
            self._switch,
            f"link add {port} type veth peer name eth0 {address} netns {self.pid}",
            f"link set {port} master bridge up",
        )
        _ip(self.pid, f"address add {self.address}/24 dev eth0", "link set eth0 up")

    def lose_power(self) -> None:
        """Kill all processes of the node at once, with its network and /dev/shm."""
        _ip(self._switch, f"link del port{self.number}")
        self._held.close()
        self.pid = 0

    def start(
        self,
        target: str,
        *arguments: Any,
        environ: Mapping[str, str] | None = None,
        points: Sequence[str] = (),
    ) -> Process:
        """Start a process that calls the function "module:function" with JSON arguments."""
        processes, directory = self._nodes._processes, self._nodes._directory
        output = directory / f"process-{len(processes) + 1}"
        call = json.dumps([_LIMIT_S, points, target, arguments])
        with ExitStack() as stack:
            out, err = (
                stack.enter_context(output.with_suffix(end).open("ab")) for end in (".out", ".err")
            )
            process = Preloaded(
                ["-c", _CALL, call],
                node=self.pid,
                cwd=directory,
                env={**os.environ, **(environ or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        processes.append(Process(process, self, output))
        return processes[-1]

    def run(self, *command: str | Path) -> str:
        """Run a command in the node; return its stdout. Raises OSError when it fails."""
        return _run("nsenter", "-t", str(self.pid), "-n", "-u", "-i", "-m", "-p", *command)

    def link(self, state: Literal["up", "down"]) -> None:
        """Connect the node to the others, or cut it off from them (a partition)."""
        _ip(self._switch, f"link set port{self.number} {state}")

    def running(self) -> dict[int, str]:
        """The pids and command lines of the node's processes, without its holder and zombies."""
        namespace = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.readlink(f"/proc/{name}/ns/pid") != namespace or int(name) == self.pid:
                    continue
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    line = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:  # it has ended
                continue
            if line:  # a zombie has none
                found[int(name)] = line
        return found


class Process:
    """A process in a node."""

    def __init__(self, process: Preloaded, node: Node, output: Path) -> None:
        self._process, self.node, self._output = process, node, output
        self.pid, self.rank = process.pid, -1

    def __repr__(self) -> str:
        return f"rank {self.rank} (pid {self.pid}) on {self.node.host}"

    @property
    def code(self) -> int | None:
        """Its exit code, negative after a signal, None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """Send SIGKILL. A process that has ended is left alone."""
        self._process.send_signal(signal.SIGKILL)

    def stop(self) -> None:
        """Send SIGSTOP: the process stays, and does nothing."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Send SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def wait(self, timeout_s: float) -> int:
        """Wait for the end; return the exit code. Raises TimeoutError with the output."""
        return self.node._nodes.wait([self], timeout_s)[0]

    def wait_stopped(self, timeout_s: float) -> None:
        """Wait until the process is stopped (SIGSTOP), for example at a kill point."""
        self._wait_until(lambda: _state(self.pid) == "T", "stopped", timeout_s)

    def wait_for(self, text: str, timeout_s: float) -> None:
        """Wait until stdout contains `text`."""
        self._wait_until(lambda: text in self.stdout(), f"seen to print {text!r}", timeout_s)

    def _wait_until(self, reached: Any, what: str, timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        while not reached():
            time.sleep(0.005)
            if self.code is not None or time.monotonic() > end_s:
                if reached():
                    return
                state = "runs" if self.code is None else f"ended with {self.code}"
                raise AssertionError(
                    f"{self} {state}, was not {what}:\n{self.stdout()}{self.stderr()}"
                )

    def stdout(self) -> str:
        """What the process has printed so far."""
        return self._output.with_suffix(".out").read_text("utf-8", errors="replace")

    def stderr(self) -> str:
        """What the process has written to stderr so far."""
        return self._output.with_suffix(".err").read_text("utf-8", errors="replace")


@contextmanager
def _pipe() -> Iterator[int]:
    """Yield the end to read of a pipe; the other end is closed with this process or the block."""
    reader, writer = os.pipe()
    try:
        yield reader
    finally:
        os.close(writer)
        os.close(reader)


@contextmanager
def _holder(life: int, setup: str) -> Iterator[int]:
    """Yield the pid of a process that holds new namespaces, after `setup` was run in them.

    It ends when the pipe `life` is closed.
    """
    command = [*_UNSHARE, "bash", "-c", _HOLD.format(setup=setup)]
    holder = subprocess.Popen(
        command, stdin=life, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        with holder.stdout, holder.stderr:
            pid = holder.stdout.readline().strip()
            if not pid:
                raise OSError(holder.stderr.read().strip())
        yield int(pid)
    finally:
        holder.kill()  # the kernel kills its child, and with it all processes of the namespace
        holder.wait()


def _address(number: int) -> str:
    return f"10.77.0.{number + 1}"


def _ip(pid: int, *lines: str) -> None:
    for line in lines:
        _run("nsenter", "-t", str(pid), "-n", "ip", *line.split())


def _run(*command: str | Path) -> str:
    done = captured(command)
    if done.returncode:
        raise OSError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")
    return done.stdout


def _state(pid: int) -> str:
    """The state of a process, as a letter of /proc/PID/stat; empty if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""
