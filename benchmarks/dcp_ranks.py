"""Saves of several ranks: iobench.Checkpointer against stock dcp.save and dcp.async_save.

    python benchmarks/dcp_ranks.py /mnt/nvme --ranks 2 4 --size 512MiB --repeats 5

The ranks are processes on this machine, with gloo. The state is either replicated on all ranks
(DDP) or sharded over them (FSDP2). The ways to save are interleaved in random order. A time is that
of the slowest rank. The stall is the time until the call of an asynchronous save returns. A plain
copy copies the same bytes into memory that has its pages. Stock dcp.save syncs each file, but not
the directory, and replaces its metadata in place; iobench's time includes the commit. Ratios are
medians of the ratios of each round, whose ways follow one another.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from iobench.units import format_size, parse_size

_LAYERS = 24


def main() -> None:
    """Run the ranks and print a table for each number of them; or be one rank."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--size", type=parse_size, default=parse_size("512MiB"))
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    if "RANK" in os.environ:
        _rank(given.directory, given.size, given.repeats)
        return
    for ranks in given.ranks:
        for line in _started(ranks):
            _print(json.loads(line), given.size)


def _started(ranks: int) -> list[str]:
    """Run this script in `ranks` processes; return what rank 0 printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        "WORLD_SIZE": f"{ranks}",
        "LOCAL_WORLD_SIZE": f"{ranks}",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{port}",
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, *sys.argv],
            env=os.environ | common | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"},
            stdout=subprocess.PIPE if rank == 0 else None,
            text=True,
        )
        for rank in range(ranks)
    ]
    out, _ = processes[0].communicate()
    if any(process.wait() for process in processes):
        raise SystemExit("a rank failed")
    return out.splitlines()


def _print(found: dict[str, Any], size: int) -> None:
    print(f"\n{found['ranks']} ranks, {format_size(size)}, {found['kind']} state")
    print(f"{'':24}{'seconds':>9}{'min':>9}{'max':>9}{'stall':>9}")
    for name, times in found["times"].items():
        stall = statistics.median(found["stalls"][name])
        print(
            f"{name:24}{statistics.median(times):9.3f}{min(times):9.3f}{max(times):9.3f}"
            + (f"{stall:9.4f}" if stall else "")
        )
    times, stalls = found["times"], found["stalls"]
    for stock in ("dcp.save, 1 thread", "dcp.save, 4 threads"):
        _print_ratio(f"{stock} / iobench save", times[stock], times["iobench save"])
    for way in ("iobench save_async", "dcp.async_save"):
        _print_ratio(f"stall of {way} / plain copy", stalls[way], times["plain copy"])


def _print_ratio(what: str, one: list[float], other: list[float]) -> None:
    ratios = sorted(a / b for a, b in zip(one, other, strict=True))
    print(f"  {what}: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


def _rank(directory: Path, size: int, repeats: int) -> None:
    """Measure all ways to save in one rank; rank 0 prints a line of JSON for each kind of state."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for kind in ("replicated", "sharded"):
        case = _Case(directory / f"dcp-ranks-{kind}", kind, size, mesh)
        try:
            found = case.measure(repeats)
        finally:
            case.close()
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
    dist.destroy_process_group()


class _Case:
    """One kind of state, and the ways to save it."""

    def __init__(self, directory: Path, kind: str, size: int, mesh: Any) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.tensor import DTensor, Shard

        import iobench

        self.kind, self.directory, self.rank = kind, directory, dist.get_rank()
        self.ranks = dist.get_world_size()
        rows = size // _LAYERS // 4 // 1024
        random_ = torch.Generator().manual_seed(self.rank if kind == "sharded" else 0)
        self.state: dict[str, Any] = {}
        for layer in range(_LAYERS):
            if kind == "sharded":
                local = torch.randn(rows // self.ranks, 1024, generator=random_)
                tensor: Any = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            else:
                tensor = torch.randn(rows, 1024, generator=random_)
            self.state[f"layers.{layer}.weight"] = tensor
            self.state[f"layers.{layer}.bias"] = torch.randn(
                1024, generator=torch.Generator().manual_seed(layer)
            )
        directory.mkdir(parents=True, exist_ok=True)
        self.checkpointer = iobench.Checkpointer(directory / "iobench", keep=iobench.KeepLast(1))
        self.checkpointer.prepare(self.state, wait=True)
        self.own = torch.randn(size // self.ranks // 4)
        self.copy = torch.zeros_like(self.own)
        self.step = 0

    def measure(self, repeats: int) -> dict[str, Any]:
        """Return the times and stalls of all ways."""
        times, stalls = defaultdict(list), defaultdict(list)
        order = random.Random(1)  # the same order in all ranks
        names = list(self._ways())
        for repeat in range(repeats + 1):
            for name in order.sample(names, len(names)):
                elapsed_s, stall_s = self._timed(self._ways()[name])
                if repeat:  # the first round makes plans and pages
                    times[name].append(elapsed_s)
                    stalls[name].append(stall_s)
        in_order = {name: times[name] for name in names}
        return {"ranks": self.ranks, "kind": self.kind, "times": in_order, "stalls": stalls}

    def close(self) -> None:
        """Close the Checkpointer and remove everything."""
        import torch.distributed as dist

        self.checkpointer.close()
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(self.directory)
        dist.barrier()

    def _ways(self) -> dict[str, Callable[[], float]]:
        """Return what to measure; each returns its stall, 0 if it has none."""
        return {
            "iobench save": lambda: self._save(),
            "dcp.save, 1 thread": lambda: self._dcp(1),
            "dcp.save, 4 threads": lambda: self._dcp(4),
            "iobench save_async": lambda: self._save_async(),
            "dcp.async_save": lambda: self._dcp_async(),
            "plain copy": lambda: self._copy(),
        }

    def _timed(self, way: Callable[[], float]) -> tuple[float, float]:
        """Return the seconds of the slowest rank, and the longest stall."""
        import torch
        import torch.distributed as dist

        self.step += 1
        os.sync()
        dist.barrier()
        began_s = time.perf_counter()
        stall_s = way()
        both = torch.tensor([time.perf_counter() - began_s, stall_s])
        dist.all_reduce(both, dist.ReduceOp.MAX)
        if self.rank == 0:
            shutil.rmtree(self.directory / "dcp", ignore_errors=True)
        return float(both[0]), float(both[1])

    def _save(self) -> float:
        self.checkpointer.save(self.state, self.step)
        return 0.0

    def _save_async(self) -> float:
        save = self.checkpointer.save_async(self.state, self.step)
        self.checkpointer.wait()
        return save.stall_s

    def _dcp(self, threads: int) -> float:
        import torch.distributed.checkpoint as dcp

        writer = dcp.FileSystemWriter(self.directory / "dcp", thread_count=threads)
        dcp.save(self.state, storage_writer=writer)
        return 0.0

    def _dcp_async(self) -> float:
        import torch.distributed.checkpoint as dcp

        began_s = time.perf_counter()
        future = dcp.async_save(
            self.state, storage_writer=dcp.FileSystemWriter(self.directory / "dcp")
        )
        stall_s = time.perf_counter() - began_s
        future.result()  # type: ignore[union-attr]  # a Future without a stager
        return stall_s

    def _copy(self) -> float:
        began_s = time.perf_counter()
        self.copy.copy_(self.own)
        return time.perf_counter() - began_s


if __name__ == "__main__":
    main()
