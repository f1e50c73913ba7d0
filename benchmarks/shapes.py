r"""One state in 10^2 to 10^5 tensors, saved and loaded by iobench, torch, safetensors and DCP.

    python benchmarks/shapes.py --target DIRECTORY [--size 954MiB] \
        [--tensors 100,1000,10000,100000] [--rounds 3] [--once-above 5] [--writer hybrid] \
        [--only PATTERN] [--no-settle] [--record FILE]

The tensors are float32 and of equal size; `--size` is their sum. Every save is durable and every
load is cold. Bytes are compared outside of the clock. Within each round the order is random.
A stall is the time until `save_async` returns. The plain copy copies each tensor to memory that is
there already, or to fresh memory. A first save or stall is that of a new Checkpointer, the first
save with new tensor names; "prepared" is a first stall after `Checkpointer.prepare`.

Each arm ran once on a small state, and once on the state before the first round. If that second run
took more than `--once-above` seconds, it is the only measurement of the arm, and the table says so:
1 round. A whole run takes about ten minutes.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import record
import safetensors.torch
import tables
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from iobench import Checkpointer, KeepLast, linux
from iobench.bench.targets.cold import make_cold
from iobench.bench.targets.scratch import scratch_directory
from iobench.bench.targets.settle import settle
from iobench.environment import DeviceMonitor
from iobench.formats import safetensors as our_safetensors
from iobench.formats import torch_file
from iobench.integrations.dcp import StorageReader, StorageWriter
from iobench.units import MIB, parse_size
from iobench.writers.local.new_file import sync_directory
from iobench.writers.registry import make

State = dict[str, torch.Tensor]


@dataclass(kw_only=True)
class Arm:
    """`run` is timed, `before` and `after` are not. With `loads` it returns the loaded state."""

    run: Callable[[], Any]
    before: Callable[[], Any] = lambda: None
    after: Callable[[], Any] = lambda: None
    loads: bool = False


def make_state(count: int, size: int) -> State:
    """`count` tensors of random values, `size` bytes in all."""
    elements = max(1, size // count // 4)
    generator = torch.Generator().manual_seed(count)
    return {
        f"model.layers.{number // 9}.{number % 9}.weight": torch.randn(
            elements, generator=generator
        )
        for number in range(count)
    }


def sync_file(file: Path) -> None:
    """Put the file and its name on storage, which stock libraries leave out."""
    linux.sync_file(file)
    sync_directory(file.parent)


class Arms:
    """The arms on one state below one directory."""

    def __init__(self, directory: Path, state: State, writer: str) -> None:
        self.directory, self.state, self.spec = directory, state, writer
        self.writer, self._steps = make(writer), itertools.count()
        self.copies = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        self.checkpointer = Checkpointer(directory / "ours", writer=writer, keep=KeepLast(1))
        self.background = Checkpointer(directory / "async", writer=writer, keep=KeepLast(1))
        self.fresh: Checkpointer | None = None

    def close(self) -> None:
        self.checkpointer.close()
        self.background.close()

    def all(self) -> dict[str, Arm]:
        one, state, spec = self.directory, self.state, self.spec
        stock = safetensors.torch
        return {
            "save Checkpointer.save": Arm(
                run=lambda: self.checkpointer.save({"model": state}, next(self._steps))
            ),
            "save Checkpointer first save": Arm(
                before=self._open_fresh, run=self._first_save, after=self._close_fresh
            ),
            "save iobench.safetensors": Arm(
                run=lambda: our_safetensors.save(state, "ours.safetensors", one, self.writer)
            ),
            "save safetensors + fsync": Arm(
                run=lambda: (
                    stock.save_file(state, one / "stock.safetensors"),
                    sync_file(one / "stock.safetensors"),
                )
            ),
            "save iobench.torch": Arm(
                run=lambda: torch_file.save(state, "ours.pt", one, self.writer)
            ),
            "save torch + fsync": Arm(
                run=lambda: (torch.save(state, one / "stock.pt"), sync_file(one / "stock.pt"))
            ),
            "save DCP iobench": Arm(
                before=lambda: shutil.rmtree(one / "dcp-ours", ignore_errors=True),
                run=lambda: self._dcp_save("dcp-ours", lambda path: StorageWriter(path, spec)),
            ),
            "save DCP stock": Arm(
                before=lambda: shutil.rmtree(one / "dcp-stock", ignore_errors=True),
                run=lambda: self._dcp_save("dcp-stock", FileSystemWriter),
            ),
            "stall Checkpointer.save_async": Arm(
                run=lambda: self.background.save_async({"model": state}, next(self._steps)),
                after=self.background.wait,
            ),
            "stall Checkpointer first save_async": Arm(
                before=self._open_fresh,
                run=lambda: self._opened().save_async({"model": state}, 0),
                after=self._close_fresh,
            ),
            "stall Checkpointer first save_async, prepared": Arm(
                before=self._prepare_fresh,
                run=lambda: self._opened().save_async({"model": state}, 0),
                after=self._close_fresh,
            ),
            "stall plain copy": Arm(run=self._copy),
            "stall plain copy, fresh memory": Arm(
                before=linux.trim_heap,  # else the C library hands out pages of the last copy
                run=lambda: [tensor.clone() for tensor in state.values()],
            ),
            **self._loads(),
        }

    def _loads(self) -> dict[str, Arm]:
        one, spec = self.directory, self.spec
        runs: dict[str, Callable[[], Any]] = {
            "Checkpointer.load": lambda: self.checkpointer.load()["model"],
            "iobench.safetensors": lambda: our_safetensors.load(
                "ours.safetensors", one, self.writer
            )[0],
            "safetensors": lambda: _looked_at(
                safetensors.torch.load_file(one / "stock.safetensors")
            ),
            "iobench.torch": lambda: torch_file.load("ours.pt", one, self.writer)[0],
            "torch": lambda: torch.load(one / "stock.pt"),
            "DCP iobench": lambda: self._dcp_load("dcp-ours", lambda p: StorageReader(p, spec)),
            "DCP stock": lambda: self._dcp_load("dcp-stock", FileSystemReader),
        }
        return {
            f"load {name}": Arm(run=run, before=self._evict, loads=True)
            for name, run in runs.items()
        }

    def _copy(self) -> None:
        for name, tensor in self.state.items():
            self.copies[name].copy_(tensor)

    def _opened(self) -> Checkpointer:
        assert self.fresh is not None
        return self.fresh

    def _open_fresh(self) -> None:
        self.fresh = Checkpointer(self.directory / "fresh", writer=self.spec)

    def _prepare_fresh(self) -> None:
        self._open_fresh()
        self._opened().prepare({"model": self.state}, wait=True)

    def _first_save(self) -> None:
        prefix = f"round-{next(self._steps)}."
        renamed = {prefix + name: tensor for name, tensor in self.state.items()}
        self._opened().save({"model": renamed}, 0)

    def _close_fresh(self) -> None:
        self._opened().close()
        self.fresh = None
        shutil.rmtree(self.directory / "fresh")

    def _dcp_save(self, name: str, writer: Callable[[Path], Any]) -> None:
        dcp.save(self.state, storage_writer=writer(self.directory / name), no_dist=True)
        sync_directory(self.directory / name)  # stock leaves that out

    def _dcp_load(self, name: str, reader: Callable[[Path], Any]) -> State:
        for tensor in self.copies.values():
            tensor.zero_()
        dcp.load(self.copies, storage_reader=reader(self.directory / name), no_dist=True)
        return self.copies

    def _evict(self) -> None:
        make_cold(path for path in self.directory.rglob("*") if path.is_file())

    def check(self, name: str, found: State) -> None:
        for key, tensor in self.state.items():
            if not torch.equal(found[key], tensor):
                raise SystemExit(f"{name}: wrong bytes in {key}")


def _looked_at(state: State) -> State:
    """Read one byte of every page: the stock loader only maps the file."""
    for tensor in state.values():
        tensor.view(torch.uint8)[::4096].max()
    return state


def measured(arms: Arms, name: str, arm: Arm) -> dict[str, float]:
    """Run one arm; its seconds and CPU seconds, of all threads and of the calling one."""
    arm.before()
    began = time.perf_counter(), time.process_time(), time.thread_time()
    found = arm.run()
    ended = time.perf_counter(), time.process_time(), time.thread_time()
    arm.after()
    if arm.loads:
        arms.check(name, found)
    elapsed_s, cpu_s, caller_s = (end - begin for begin, end in zip(began, ended, strict=True))
    return {"elapsed_s": elapsed_s, "cpu_s": cpu_s, "caller_cpu_s": caller_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--size", type=parse_size, default="954MiB")
    parser.add_argument("--tensors", default="100,1000,10000,100000")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--once-above", type=float, default=5.0, metavar="SECONDS")
    parser.add_argument("--writer", default="hybrid")
    parser.add_argument("--only", default="", help="arms whose name matches this")
    parser.add_argument("--no-settle", action="store_true", help="do not wait for a quiet disk")
    record.add_option(parser)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    found: dict[str, list[dict[str, float]]] = {}
    with (
        record.Record(asked.record, target=asked.target) as samples,
        scratch_directory(asked.target) as scratch,
    ):
        monitor = None if asked.no_settle else DeviceMonitor(scratch)
        warm_up(scratch / "warm-up", asked)
        for count in map(int, asked.tensors.split(",")):
            for name, turn, figures in one_count(scratch, monitor, count, asked):
                found.setdefault(name, []).append(figures)
                samples.sample(name, turn, **figures)
    print(tables.shape_table(found))


def one_count(
    scratch: Path, monitor: DeviceMonitor | None, count: int, asked: argparse.Namespace
) -> Iterator[tuple[str, int, dict[str, float]]]:
    """Yield (arm, round, figures) of every arm on a state of `count` tensors."""
    directory = scratch / str(count)
    directory.mkdir()
    state = make_state(count, asked.size)
    facts = {"tensors": count, "bytes": sum(tensor.nbytes for tensor in state.values())}
    arms = Arms(directory, state, asked.writer)
    chosen, wanted = needed(arms, asked.only)

    def sample(name: str) -> dict[str, float]:
        if monitor is not None:
            settle(directory, monitor)
        return {**measured(arms, name, chosen[name]), **facts}

    several = set(wanted)
    for name in chosen:
        figures = sample(name)
        if name in wanted and figures["elapsed_s"] > asked.once_above:
            several.remove(name)
            yield f"{name}, {count}", 0, figures
    order = random.Random(count)
    for turn in range(asked.rounds):
        for name in order.sample(sorted(several), len(several)):
            yield f"{name}, {count}", turn, sample(name)
        print(f"{count} tensors: round {turn + 1} of {asked.rounds} done", flush=True)
    arms.close()
    shutil.rmtree(directory)


def needed(arms: Arms, only: str) -> tuple[dict[str, Arm], set[str]]:
    """Return the arms to run, each load after the save of its file, and the names to measure."""
    every = arms.all()
    wanted = {name for name in every if re.search(only, name)}
    saves = {name.replace("load ", "save ").replace(".load", ".save") for name in wanted}
    chosen = wanted | {name for name in every if name.removesuffix(" + fsync") in saves}
    return {name: arm for name, arm in every.items() if name in chosen}, wanted


def warm_up(directory: Path, asked: argparse.Namespace) -> None:
    """Run each arm on a small state: imports and other work of a first use."""
    directory.mkdir()
    arms = Arms(directory, make_state(100, MIB), asked.writer)
    for name, arm in needed(arms, asked.only)[0].items():
        measured(arms, name, arm)
    arms.close()
    shutil.rmtree(directory)


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    main()
