"""What replicas in peers' memory cost a training loop, and how fast a restore from them is.

    python benchmarks/replicas.py [--link 250MB] [--size 256MiB] [--rounds 5] [--stalls 20]   (root)

Two network namespaces are two nodes with one rank each; `tc tbf` limits each link to `--link` bytes
per second in each direction. On the same connections, in turn within each round:

- restore: rank 0 reads its bytes from the memory of node 1, each piece compared with its checksum,
  against a plain transfer of the same number of bytes through one TCP connection
- steps: a step computes for 40 ms and then exchanges `--exchange` bytes with the other rank, as
  data parallel training does. The CPU is idle meanwhile, as on a GPU node, or `--work busy` with
  matrix products in one thread per rank. Steps during a replication at the default pace are
  compared with steps without one
- stall: `save_async` while a snapshot is being sent, against the same without replicas, in
  `--stalls` rounds with the median of several saves of each; the storage is a file system in
  memory, and idle
- CPU: seconds of the agents per GB that they send and receive
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from idle import wait_until_idle

from iobench.bench.judging.stats import median_interval
from iobench.dist.control import shared_control
from iobench.dist.replicas.partner import Partner
from iobench.dist.replicas.recovery import RecoveryPlan, Version
from iobench.dist.replicas.replicator import Replicator
from iobench.dist.replicas.runtime import AgentDirectory, job_of
from iobench.dist.world import World
from iobench.units import parse_size
from iobench.writers.image import Bytes, FileImage

_LOCATION = "/runs/bench"
_STEP_S = 0.04
_SAVES = 6  # of each kind in a round of stalls: they must end before the replica is sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--link", default="250MB")
    parser.add_argument("--size", default="256MiB")
    parser.add_argument("--exchange", default="1MiB")
    parser.add_argument("--work", choices=("idle", "busy"), default="idle")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stalls", type=int, default=20)
    parser.add_argument("--in-node", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.in_node:
        _Rank(asked).run()
        return
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from support.nodes import open_nodes

    with (
        tempfile.TemporaryDirectory() as directory,
        _memory_storage(Path(directory) / "storage") as storage,
        open_nodes(2, directory=Path(directory), limit_s=900) as nodes,
    ):
        for node in nodes:
            node.shape(parse_size(asked.link))
        ranks = nodes.ranks(
            [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--in-node", str(storage)],
            environ={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        if any(nodes.wait(ranks, 900)):
            sys.exit("\n".join(f"{one}:\n{one.stdout()}{one.stderr()}" for one in ranks))
        found = json.loads(ranks[0].stdout().splitlines()[-1])
        sys.stderr.write(ranks[0].stderr())
    _show(asked, found)


@contextmanager
def _memory_storage(at: Path) -> Iterator[Path]:
    """A file system in memory that both nodes see."""
    at.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "storage", str(at)], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


def _show(asked: argparse.Namespace, found: dict[str, Any]) -> None:
    print(f"link {asked.link}/s, {asked.size} per rank, medians (range)")
    if found["plain_s"]:
        _show_rounds(asked, found)
    if found["stall_s"]:
        _show_stalls(found)


def _show_rounds(asked: argparse.Namespace, found: dict[str, Any]) -> None:
    size = parse_size(asked.size)
    plain, fetched = found["plain_s"], found["fetch_s"]
    ratios = [fetch / one for fetch, one in zip(fetched, plain, strict=True)]
    without, during = found["step_s"], found["replicated_step_s"]
    slower = [100 * (b / a - 1) for a, b in zip(without, during, strict=True)]
    print(f"plain transfer       {_shown(plain)} s, {size / _median(plain) / 1e6:.0f} MB/s")
    print(f"restore from partner {_shown(fetched)} s, {size / _median(fetched) / 1e6:.0f} MB/s")
    print(f"ratio                {_shown(ratios)}")
    print(f"pace                 {found['rate'] / 1e6:.0f} MB/s")
    print(f"replication          {_shown(found['push_s'])} s")
    print(f"step without         {_shown([1000 * one for one in without])} ms ({asked.work})")
    print(f"step during          {_shown([1000 * one for one in during])} ms")
    print(f"slower by            {_shown(slower)} %")
    print(f"CPU of both agents   {found['agent_cpu_s_per_gb']:.2f} s per GB replicated, at nice 10")


def _show_stalls(found: dict[str, Any]) -> None:
    for what, figure in (("stall", "stall_s"), ("CPU of a stall", "stall_s_cpu")):
        without, during = found[figure], found[f"replicated_{figure}"]
        print(f"{what:20} {_shown([1000 * one for one in without])} ms without")
        print(f"{'':20} {_shown([1000 * one for one in during])} ms during a replication")
        ratios = [b / a for a, b in zip(without, during, strict=True)]
        interval = median_interval(ratios)
        bounds = f"{interval.low:.2f} to {interval.high:.2f}" if interval else "1 round"
        print(f"{'ratio':20} {_median(ratios):.2f}, 95% interval {bounds}, {len(ratios)} rounds")


def _shown(values: list[float]) -> str:
    return f"{_median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


_median = statistics.median


class _Rank:
    """One rank in its node."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.size = asked, parse_size(asked.size)
        self.world = World.detect()
        self.control = shared_control(self.world)
        self.memory = np.random.default_rng(self.world.rank).integers(0, 256, self.size, np.uint8)
        self.image = FileImage.of("state", [self.memory])
        self.into = np.zeros_like(self.memory)  # pages are there: only the transfer counts
        self.peer = self._peer()
        self.matrix = np.random.default_rng(0).random((512, 512))
        self.products = self._calibrated()
        self.serial = 0

    def _peer(self) -> socket.socket:
        interface = self.control.interface
        assert interface is not None
        if self.world.rank == 0:
            with socket.create_server((interface.address, 0)) as server:
                self.control.broadcast("peer", server.getsockname(), deadline_s=60)
                connection, _ = server.accept()
        else:
            address = self.control.broadcast("peer", deadline_s=60)
            connection = socket.create_connection(tuple(address))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _calibrated(self) -> int:
        began_s, count = time.perf_counter(), 0
        while time.perf_counter() - began_s < 0.5:
            self.matrix @ self.matrix
            count += 1
        found = self.control.all_gather("calibrate", count, deadline_s=60)
        return max(1, round(min(found) * _STEP_S / 0.5))

    def run(self) -> None:
        replicator = Replicator(Partner(), self.control, _LOCATION)
        found: dict[str, Any] = {"rate": replicator.rate_bytes_per_s, "push_s": []}
        names = ("plain_s", "fetch_s", "step_s", "replicated_step_s")
        found |= {name: [] for name in names}
        self._replicate(replicator)
        cpu_s, sent = self._agents_cpu_s(), 0
        for _ in range(self.asked.rounds):
            found["plain_s"].append(self._plain())
            found["fetch_s"].append(self._fetch(replicator))
            found["step_s"].append(self._steps(None))
            found["replicated_step_s"].append(self._steps(replicator))
            replicator.wait()
            last = replicator.replicas[-1]
            assert last.outcome == "complete", last
            found["push_s"].append(last.push_s)
            sent += self.world.size * self.size
        moved = sent + self.asked.rounds * self.size
        found["agent_cpu_s_per_gb"] = (self._agents_cpu_s() - cpu_s) / max(moved, 1) * 1e9
        replicator.warn()
        replicator.close(finished=True)
        found |= self._stalls()
        self.control.close()
        print(json.dumps(found))

    def _replicate(self, replicator: Replicator) -> None:
        self.serial += 1
        replicator.offer(Version(self.serial, self.serial, "bench"), self.image).wait()
        replicator.wait()

    def _agents_cpu_s(self) -> float:
        record = AgentDirectory.of(job_of(_LOCATION)).record()
        assert record is not None
        fields = Path(f"/proc/{record.pid}/stat").read_text().rpartition(")")[2].split()
        own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return sum(self.control.all_gather("CPU", own, deadline_s=60))

    def _plain(self) -> float:
        """Send rank 1's bytes to rank 0 through one connection."""
        self.control.barrier("plain", deadline_s=600)
        began_s = time.perf_counter()
        if self.world.rank == 1:
            self.peer.sendall(self.memory.data)
        else:
            _receive(self.peer, self.into)
        elapsed_s = time.perf_counter() - began_s
        self.control.barrier("plain done", deadline_s=600)
        return elapsed_s

    def _fetch(self, replicator: Replicator) -> float:
        version = Version(self.serial, self.serial, "bench")
        plan = RecoveryPlan(version=version, ranks=2, stored=False, holders={0: (1,)})
        self.control.barrier("fetch", deadline_s=600)
        began_s = time.perf_counter()
        if self.world.rank == 0:
            done = replicator.fetch(plan, 0, 0, self.into)
            assert not done.missing
        elapsed_s = time.perf_counter() - began_s
        self.control.barrier("fetch done", deadline_s=600)
        if self.world.rank == 0:
            assert np.array_equal(self.into, self.memory)
        return elapsed_s

    def _steps(self, replicator: Replicator | None) -> float:
        """Return the median time of a step; with a replicator, while it replicates."""
        self.control.barrier("steps", deadline_s=600)
        if replicator is not None:
            self.serial += 1
            # The copy into the own agent has ended: the stall of a save covers it elsewhere.
            replicator.offer(Version(self.serial, self.serial, "bench"), self.image).wait()
        self.control.barrier("begin steps", deadline_s=600)
        part = self.memory[: parse_size(self.asked.exchange)]
        other = np.empty_like(part)
        times = []
        for _ in range(60):
            began_s = time.perf_counter()
            self._compute()
            first, second = (
                (lambda: self.peer.sendall(part.data), lambda: _receive(self.peer, other))
            )[:: 1 if self.world.rank == 0 else -1]
            first()
            second()
            times.append(time.perf_counter() - began_s)
        if replicator is not None and self.world.rank == 0 and not replicator.busy:
            sys.stderr.write("the replication ended before the steps: use a larger --size\n")
        return statistics.median(times)

    def _stalls(self) -> dict[str, list[float]]:
        """Return the stalls of saves without replicas, and while one is being sent."""
        import torch

        from iobench import Checkpointer, KeepLast, PerRank

        storage = self.asked.in_node
        options: dict[str, Any] = {"writer": "buffered", "keep": KeepLast(1)}
        arms = {
            "stall_s": Checkpointer(storage / "plain", **options),
            "replicated_stall_s": Checkpointer(storage / "kept", replicate=Partner(), **options),
        }
        tensors = torch.from_numpy(self.memory).view(torch.float32).split(1 << 20)
        state = {"own": PerRank(dict(enumerate(map(torch.clone, tensors))))}
        for ckpt in arms.values():
            ckpt.prepare(state, wait=True)
        found: dict[str, list[float]] = {
            f"{name}{end}": [] for name in arms for end in ("", "_cpu")
        }
        steps = itertools.count()
        for number in range(self.asked.stalls + 1):
            for name in list(arms)[:: 1 if number % 2 else -1]:
                stalls, cpu = self._stalls_of(arms[name], state, steps, name != "stall_s")
                if number:  # the first round makes plans and pages
                    found[name].append(stalls)
                    found[f"{name}_cpu"].append(cpu)
        for ckpt in arms.values():
            ckpt.close()
        return found

    def _stalls_of(
        self, ckpt: Any, state: Any, steps: Iterator[int], replicates: bool
    ) -> tuple[float, float]:
        """Return the median stall of a few saves and its CPU time; during a replication, or not."""
        sent = len(ckpt.replicas)
        if self.world.rank == 0:
            wait_until_idle()
        if replicates:  # the saves after it are not replicated, because it is still being sent
            ckpt.save_async(state, next(steps))
            ckpt.wait()
        stalls, cpu = [], []
        for _ in range(_SAVES):
            if not replicates and self.world.rank == 0:
                wait_until_idle()
            self.control.barrier("save", deadline_s=60)
            before_s = time.process_time()
            save = ckpt.save_async(state, next(steps))
            cpu.append(time.process_time() - before_s)
            ckpt.wait()
            stalls.append(save.stall_s)
        if replicates and len(ckpt.replicas) > sent:
            sys.stderr.write("the replica was sent before the saves: use a larger --size\n")
        while replicates and len(ckpt.replicas) < sent + _SAVES + 1:
            time.sleep(0.01)
        every = self.control.all_gather("stalls", [_median(stalls), _median(cpu)], deadline_s=60)
        return max(one[0] for one in every), max(one[1] for one in every)

    def _compute(self) -> None:
        if self.asked.work == "idle":
            time.sleep(_STEP_S)
            return
        for _ in range(self.products):
            self.matrix @ self.matrix


def _receive(connection: socket.socket, memory: Bytes) -> None:
    view = memoryview(memory.data)
    while len(view):
        count = connection.recv_into(view)
        assert count
        view = view[count:]


if __name__ == "__main__":
    main()
