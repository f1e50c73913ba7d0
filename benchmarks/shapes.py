r"""One state in 10^2 to 10^5 tensors, saved and loaded by iobench, torch, safetensors and DCP.

    python benchmarks/shapes.py --target DIRECTORY [--size 954MiB] [--rounds 3] [--record FILE]
        [--tensors 100,1000,10000,100000] [--writer hybrid] [--only PATTERN]

The tensors are float32 and of equal size; `--size` is their sum. Every save is durable and every
load is cold. Bytes are compared outside of the clock. Within each round the order is random.
A stall is the time until `save_async` returns. The plain copy copies each tensor to memory that is
there already, or to fresh memory. A first save or stall is that of a new Checkpointer, the first
save with new tensor names; "prepared" is a first stall after `Checkpointer.prepare`. Each arm runs
once before the first round.
"""

from __future__ import annotations

import itertools
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import arms
import torch
import torch.distributed.checkpoint as dcp
from safetensors import torch as stock
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from iobench import Checkpointer, KeepLast, linux
from iobench.bench.targets.cold import make_cold
from iobench.bench.targets.settle import Patience, settled
from iobench.environment import DeviceMonitor
from iobench.formats import safetensors, torch_file
from iobench.integrations.dcp import StorageReader, StorageWriter
from iobench.units import parse_size
from iobench.writers.local.new_file import sync_directory
from iobench.writers.registry import make

State = dict[str, torch.Tensor]


@dataclass(kw_only=True)
class Arm:
    """`run` is timed, `before` and `after` are not. A load returns the loaded state."""

    run: Callable[[], Any]
    before: Callable[[], Any] = lambda: None
    after: Callable[[], Any] = lambda: None


def make_state(count: int, size: int) -> State:
    """`count` tensors of random values, `size` bytes in all."""
    elements = max(1, size // count // 4)
    chance = torch.Generator().manual_seed(count)
    return {
        f"model.layers.{number // 9}.{number % 9}.weight": torch.randn(elements, generator=chance)
        for number in range(count)
    }


def synced(save: Callable[[State, Path], Any], state: State, file: Path) -> None:
    """Save by a stock library, which leaves out to put the file and its name on storage."""
    save(state, file)
    linux.sync_file(file)
    sync_directory(file.parent)


@contextmanager
def arms_of(at: Path, state: State, spec: str) -> Iterator[dict[str, Arm]]:
    """The arms on one state below one directory."""
    writer, steps, model = make(spec), itertools.count(), {"model": state}
    copies = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    new: list[Checkpointer] = []

    def first(run: Callable[[Checkpointer], Any], *, prepared: bool = False) -> Arm:
        def before() -> None:
            new.append(Checkpointer(at / "new", writer=spec))
            if prepared:
                new[0].prepare(model, wait=True)

        def after() -> None:
            new.pop().close()
            shutil.rmtree(at / "new")

        return Arm(run=lambda: run(new[0]), before=before, after=after)

    def renamed() -> State:
        prefix = f"round-{next(steps)}."
        return {prefix + name: tensor for name, tensor in state.items()}

    def by_dcp(name: str, write: Callable[[Path], Any], read: Callable[[Path], Any]) -> list[Arm]:
        def save() -> None:
            dcp.save(state, storage_writer=write(at / name), no_dist=True)
            sync_directory(at / name)  # stock leaves that out

        def load() -> State:
            dcp.load(copies, storage_reader=read(at / name), no_dist=True)
            return copies

        def before() -> None:
            for tensor in copies.values():
                tensor.zero_()
            evict()

        remove = partial(shutil.rmtree, at / name, ignore_errors=True)
        return [Arm(run=save, before=remove), Arm(run=load, before=before)]

    def evict() -> None:
        make_cold(path for path in at.rglob("*") if path.is_file())

    def copy() -> None:
        for name, tensor in state.items():
            copies[name].copy_(tensor)

    def load(run: Callable[[], State]) -> Arm:
        return Arm(run=run, before=evict)

    def looked_at() -> State:
        """Read one byte of every page: the stock loader only maps the file."""
        found = stock.load_file(at / "stock.safetensors")
        for tensor in found.values():
            tensor.view(torch.uint8)[::4096].max()
        return found

    ours = by_dcp("ours", lambda path: StorageWriter(path, spec), lambda p: StorageReader(p, spec))
    theirs = by_dcp("theirs", FileSystemWriter, FileSystemReader)
    with (
        Checkpointer(at / "run", writer=spec, keep=KeepLast(1)) as ckpt,
        Checkpointer(at / "async", writer=spec, keep=KeepLast(1)) as background,
    ):
        yield {
            "save Checkpointer.save": Arm(run=lambda: ckpt.save(model, next(steps))),
            "save Checkpointer first save": first(lambda one: one.save({"model": renamed()}, 0)),
            "save iobench.safetensors": Arm(
                run=lambda: safetensors.save(state, "ours.safetensors", at, writer)
            ),
            "save safetensors + fsync": Arm(
                run=lambda: synced(stock.save_file, state, at / "stock.safetensors")
            ),
            "save iobench.torch": Arm(run=lambda: torch_file.save(state, "ours.pt", at, writer)),
            "save torch + fsync": Arm(run=lambda: synced(torch.save, state, at / "stock.pt")),
            "save DCP iobench": ours[0],
            "save DCP stock": theirs[0],
            "stall Checkpointer.save_async": Arm(
                run=lambda: background.save_async(model, next(steps)), after=background.wait
            ),
            "stall Checkpointer first save_async": first(lambda one: one.save_async(model, 0)),
            "stall Checkpointer first save_async, prepared": first(
                lambda one: one.save_async(model, 0), prepared=True
            ),
            "stall plain copy": Arm(run=copy),
            "stall plain copy, fresh memory": Arm(
                before=linux.trim_heap,  # else the C library hands out pages of the last copy
                run=lambda: [tensor.clone() for tensor in state.values()],
            ),
            "load Checkpointer.load": load(lambda: ckpt.load()["model"]),
            "load iobench.safetensors": load(
                lambda: safetensors.load("ours.safetensors", at, writer)[0]
            ),
            "load safetensors": load(looked_at),
            "load iobench.torch": load(lambda: torch_file.load("ours.pt", at, writer)[0]),
            "load torch": load(lambda: torch.load(at / "stock.pt")),
            "load DCP iobench": ours[1],
            "load DCP stock": theirs[1],
        }


def measured(name: str, arm: Arm, state: State) -> dict[str, float]:
    """Run one arm; its seconds and CPU seconds, of all threads and of the calling one."""
    arm.before()
    began = time.perf_counter(), time.process_time(), time.thread_time()
    found = arm.run()
    ended = time.perf_counter(), time.process_time(), time.thread_time()
    arm.after()
    if name.startswith("load") and not all(torch.equal(found[key], state[key]) for key in state):
        raise SystemExit(f"{name}: wrong bytes")
    elapsed_s, cpu_s, caller_s = (end - begin for begin, end in zip(began, ended, strict=True))
    return {"elapsed_s": elapsed_s, "cpu_s": cpu_s, "caller_cpu_s": caller_s}


def main() -> None:
    parser = arms.options(__doc__, rounds=3)
    parser.add_argument("--size", type=parse_size, default="954MiB")
    parser.add_argument("--tensors", default="100,1000,10000,100000")
    parser.add_argument("--writer", default="hybrid")
    parser.add_argument("--only", default="", help="arms whose name matches this, and all saves")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    with arms.recording(asked) as (scratch, kept):
        monitor = DeviceMonitor(scratch)
        for count in map(int, asked.tensors.split(",")):
            directory, patience = scratch / str(count), Patience()
            directory.mkdir()
            state = make_state(count, asked.size)
            size = sum(tensor.nbytes for tensor in state.values())
            with arms_of(directory, state, asked.writer) as every:
                chosen = [
                    name for name in every if name.startswith("save") or re.search(asked.only, name)
                ]
                for name in chosen:
                    measured(name, every[name], state)
                for turn, name in arms.in_rounds(chosen, asked.rounds):
                    with settled(directory, monitor, patience):
                        pass  # a busy device is waited for less and less
                    figures = measured(name, every[name], state)
                    kept.sample(f"{name}, {count}", turn, **figures, tensors=count, bytes=size)
            shutil.rmtree(directory)
    kept.print_table()


if __name__ == "__main__":
    main()
