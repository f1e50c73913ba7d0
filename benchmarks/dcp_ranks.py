"""Saves of several ranks: iobench.Checkpointer against stock dcp.save and dcp.async_save.

    python benchmarks/dcp_ranks.py /mnt/nvme --ranks 2 4 --size 512MiB --repeats 10 --stalls 30

The ranks are processes on this machine, with gloo, each in a session of its own as under torchrun.
The state is either replicated on all ranks (DDP) or sharded over them (FSDP2). The ways to save are
interleaved in random order. A time is that of the slowest rank. CPU is that of all ranks, without
the kernel's threads. Stock dcp.save syncs each file, but not the directory, and replaces its
metadata in place; iobench's time includes the commit. With root, other programs get the CPUs only
when no rank needs them.

The stall is the time until the call of an asynchronous save returns. It is measured in `--stalls`
rounds of their own, each next to a plain copy of the same bytes by all ranks: each tensor by
`Tensor.copy_` into memory that has its pages. Ratios are medians of the ratios of each round, with
their 95% intervals.
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
from typing import Any, NamedTuple

from idle import first_of_all, wait_until_idle

from iobench.bench.judging.stats import median_interval
from iobench.units import GIB, format_size, parse_size

_LAYERS = 24
_COPY, _STALL = "plain copy", "iobench save_async"


def main() -> None:
    """Run the ranks and print a table for each number of them; or be one rank."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--size", type=parse_size, default=parse_size("512MiB"))
    parser.add_argument("--repeats", type=int, default=10, help="rounds of whole saves")
    parser.add_argument("--stalls", type=int, default=30, help="rounds of stalls")
    parser.add_argument("--writer", default="hybrid", help="of iobench")
    parser.add_argument("--reuse", action="store_true", help="Checkpointer(reuse_files=True)")
    parser.add_argument("--kinds", nargs="+", default=["replicated", "sharded"])
    given = parser.parse_args()
    if "RANK" in os.environ:
        _rank(given)
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
            start_new_session=True,  # torchrun does so
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        out, _ = processes[0].communicate()
        if any(process.wait() for process in processes):
            raise SystemExit("a rank failed")
    finally:
        for process in processes:
            process.kill()
    return out.splitlines()


def _print(found: dict[str, Any], size: int) -> None:
    print(f"\n{found['ranks']} ranks, {format_size(size)}, {found['kind']} state")
    times, stalls = found["times"], found["stalls"]
    if times:
        print(f"{'':26}{'seconds':>9}{'min':>9}{'max':>9}{'GiB/s':>9}{'CPU s/GiB':>11}{'stall':>9}")
    for name, series in times.items():
        elapsed_s, stall_s = statistics.median(series), statistics.median(found["saving"][name])
        cpu_s = statistics.median(found["cpu"][name]) * GIB / size
        print(
            f"{name:26}{elapsed_s:9.3f}{min(series):9.3f}{max(series):9.3f}"
            f"{size / GIB / elapsed_s:9.2f}{cpu_s:11.2f}" + (f"{stall_s:9.4f}" if stall_s else "")
        )
    for stock in ("dcp.save, 1 thread", "dcp.save, 4 threads"):
        if times:
            _print_ratio(f"{stock} / iobench save", times[stock], times["iobench save"])
    for name, series in stalls.items():
        cpu_ms = 1000 * statistics.median(found["thread"][name])
        ms = 1000 * statistics.median(series)
        print(f"{name:26}{ms:9.1f} ms, CPU of all trainers' threads {cpu_ms:.1f} ms")
    for what, figure in (
        (("stall", stalls), ("CPU time of the stall", found["thread"])) if stalls else ()
    ):
        _print_ratio(f"{what} of {_STALL} / {_COPY}", figure[_STALL], figure[_COPY])


def _print_ratio(what: str, one: list[float], other: list[float]) -> None:
    ratios = [a / b for a, b in zip(one, other, strict=True)]
    if not ratios:
        return
    interval = median_interval(ratios)
    bounds = f"{interval.low:.2f} to {interval.high:.2f}" if interval else "1 round"
    print(f"  {what}: {statistics.median(ratios):.2f} ({bounds}; {len(ratios)} rounds)")


def _rank(given: argparse.Namespace) -> None:
    """Measure all ways to save in one rank; rank 0 prints a line of JSON for each kind of state."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    first_of_all()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for kind in given.kinds:
        case = _Case(given, kind, mesh)
        try:
            found = case.measure(given.repeats, given.stalls)
        finally:
            case.close()
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
    dist.destroy_process_group()


class _Stall(NamedTuple):
    """Seconds that the trainer waited, and CPU time of its thread in them."""

    stall_s: float
    thread_s: float


class _Case:
    """One kind of state, and the ways to save it."""

    def __init__(self, given: argparse.Namespace, kind: str, mesh: Any) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.tensor import DTensor, Shard

        import iobench

        self.kind, self.rank, self.ranks = kind, dist.get_rank(), dist.get_world_size()
        self.directory, size = given.directory / f"dcp-ranks-{kind}", given.size
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
        self.directory.mkdir(parents=True, exist_ok=True)
        self.checkpointer = iobench.Checkpointer(
            self.directory / "iobench",
            writer=given.writer,
            keep=iobench.KeepLast(1),
            reuse_files=given.reuse,
        )
        self.checkpointer.prepare(self.state, wait=True)
        self.own = [self._share(tensor) for tensor in self.state.values()]
        self.copies = [torch.zeros_like(tensor) for tensor in self.own]
        self.step = 0

    def measure(self, repeats: int, rounds: int) -> dict[str, Any]:
        """Return the figures of whole saves, and of stalls in rounds of their own."""
        saves = self._rounds(self._ways(), repeats)
        stalls = self._rounds({_COPY: self._copy, _STALL: self._save_async}, rounds)
        return {
            "ranks": self.ranks,
            "kind": self.kind,
            "times": saves["elapsed"],
            "saving": saves["stall"],
            "stalls": stalls["stall"],
            "cpu": saves["cpu"],
            "thread": stalls["thread"],
        }

    def _rounds(
        self, ways: dict[str, Callable[[], _Stall]], rounds: int
    ) -> dict[str, dict[str, list[float]]]:
        """Measure all ways in each round, in random order. Return each figure of each way."""
        found: dict[str, dict[str, list[float]]] = defaultdict(lambda: {name: [] for name in ways})
        order = random.Random(1)  # the same order in all ranks
        for number in range(rounds + 1 if rounds else 0):
            for name in order.sample(list(ways), len(ways)):
                for figure, value in self._timed(ways[name]).items():
                    if number:  # the first round makes plans and pages
                        found[figure][name].append(value)
        return found if rounds else defaultdict(dict)

    def close(self) -> None:
        """Close the Checkpointer and remove everything."""
        import torch.distributed as dist

        self.checkpointer.close()
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(self.directory)
        dist.barrier()

    def _ways(self) -> dict[str, Callable[[], _Stall]]:
        """Return the ways to save."""
        return {
            "iobench save": self._save,
            "dcp.save, 1 thread": lambda: self._dcp(1),
            "dcp.save, 4 threads": lambda: self._dcp(4),
            "iobench save_async": self._save_async,
            "dcp.async_save": self._dcp_async,
        }

    def _timed(self, way: Callable[[], _Stall]) -> dict[str, float]:
        """Return the times of the slowest rank, and the CPU times of all ranks together."""
        import torch
        import torch.distributed as dist

        self.step += 1
        os.sync()
        if self.rank == 0:
            wait_until_idle()
        dist.barrier()
        began_s, cpu_s = time.perf_counter(), time.process_time()
        stall = way()
        most = torch.tensor([time.perf_counter() - began_s, stall.stall_s])
        total = torch.tensor([time.process_time() - cpu_s, stall.thread_s])
        dist.all_reduce(most, dist.ReduceOp.MAX)
        dist.all_reduce(total)
        if self.rank == 0:
            shutil.rmtree(self.directory / "dcp", ignore_errors=True)
        return dict(
            zip(
                ("elapsed", "stall", "cpu", "thread"),
                [*most.tolist(), *total.tolist()],
                strict=True,
            )
        )

    def _save(self) -> _Stall:
        self.checkpointer.save(self.state, self.step)
        return _Stall(0.0, 0.0)

    def _save_async(self) -> _Stall:
        cpu_s = time.thread_time()
        save = self.checkpointer.save_async(self.state, self.step)
        cpu_s = time.thread_time() - cpu_s
        self.checkpointer.wait()
        return _Stall(save.stall_s, cpu_s)

    def _dcp(self, threads: int) -> _Stall:
        import torch.distributed.checkpoint as dcp

        writer = dcp.FileSystemWriter(self.directory / "dcp", thread_count=threads)
        dcp.save(self.state, storage_writer=writer)
        return _Stall(0.0, 0.0)

    def _dcp_async(self) -> _Stall:
        import torch.distributed.checkpoint as dcp

        began_s, cpu_s = time.perf_counter(), time.thread_time()
        future = dcp.async_save(
            self.state, storage_writer=dcp.FileSystemWriter(self.directory / "dcp")
        )
        stall = _Stall(time.perf_counter() - began_s, time.thread_time() - cpu_s)
        future.result()  # type: ignore[union-attr]  # a Future without a stager
        return stall

    def _copy(self) -> _Stall:
        began_s, cpu_s = time.perf_counter(), time.thread_time()
        for copy, tensor in zip(self.copies, self.own, strict=True):
            copy.copy_(tensor)
        return _Stall(time.perf_counter() - began_s, time.thread_time() - cpu_s)

    def _share(self, tensor: Any) -> Any:
        """Return the part of a tensor that this rank writes, about."""
        if self.kind == "sharded" and hasattr(tensor, "to_local"):
            return tensor.to_local()
        return tensor.view(-1).chunk(self.ranks)[self.rank]


if __name__ == "__main__":
    main()
