r"""Whole files loaded into fresh memory, cold: our formats by several writers, and what torch does.

    python benchmarks/load.py --target DIRECTORY [--size 2GiB] [--rounds 5] [--only PATTERN] \
        [--record FILE]

The tensors are those of Llama layers, in bfloat16, in one safetensors file and one torch file. An
arm "in place" loads as iobench does by default, "no pages ahead" leaves it to the read to make the
memory's pages, and "each its own" loads with `allocate=`, so that every tensor has memory of its
own. The clock stops when a byte of every page of every tensor was looked at, since safetensors' own
loader only maps the file. Bytes are compared outside of it.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import record
import safetensors.torch
import torch

from iobench.bench.targets.cold import make_cold
from iobench.bench.targets.scratch import scratch_directory
from iobench.bench.targets.settle import settle
from iobench.environment import DeviceMonitor
from iobench.formats import safetensors as our_safetensors
from iobench.formats import torch_file
from iobench.formats.tensors import allocate
from iobench.units import GIB, MIB, parse_size
from iobench.writers.blocks import prefault
from iobench.writers.config import load_writer

State = dict[str, torch.Tensor]
Load = Callable[[], State]

WRITERS = ["odirect", "uring", "hybrid", "buffered"]
_SHAPES = [(4096, 4096)] * 4 + [(11008, 4096)] * 3 + [(4096,)] * 2


def make_state(size: int) -> State:
    """Llama layers of random bytes, as many as fit into `size` bytes, at least one."""
    rng, state, layer = np.random.default_rng(), {}, 0
    while not state or sum(t.nbytes for t in state.values()) * (layer + 1) <= size * layer:
        for number, shape in enumerate(_SHAPES):
            count = int(np.prod(shape))
            raw = torch.from_numpy(rng.integers(0, 2**16, count, np.uint16))
            state[f"layers.{layer}.{number}"] = raw.view(torch.bfloat16).reshape(shape)
        layer += 1
    return state


def arms(directory: Path) -> dict[str, Load]:
    found: dict[str, Load] = {
        "safetensors load_file": lambda: safetensors.torch.load_file(directory / "s"),
        "torch load": lambda: torch.load(directory / "t"),
    }
    for spec in WRITERS:
        writer = load_writer(spec)
        for how, given, ahead in (
            ("in place", None, True),
            ("no pages ahead", None, False),
            ("each its own", allocate, True),
        ):

            def load_safetensors(writer=writer, given=given, ahead=ahead) -> State:
                with pages(ahead=ahead):
                    return our_safetensors.load("s", directory, writer, allocate=given)[0]

            def load_torch(writer=writer, given=given, ahead=ahead) -> State:
                with pages(ahead=ahead):
                    return torch_file.load("t", directory, writer, allocate=given)[0]

            found[f"safetensors {spec}, {how}"] = load_safetensors
            found[f"torch {spec}, {how}"] = load_torch
    return found


@contextmanager
def pages(*, ahead: bool) -> Iterator[None]:
    """With or without the thread that makes pages ahead of the read."""
    lead = prefault.LEAD_BYTES
    prefault.LEAD_BYTES = lead if ahead else 1 << 60
    try:
        yield
    finally:
        prefault.LEAD_BYTES = lead


def look(state: State) -> None:
    """Read one byte of every page."""
    for tensor in state.values():
        tensor.reshape(-1).view(torch.uint8)[::4096].max()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--size", type=parse_size, default="2GiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="arms whose name matches this")
    record.add_option(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    state = make_state(arguments.size)
    size = sum(tensor.nbytes for tensor in state.values())
    rates: dict[str, list[float]] = {}
    cpu_s: dict[str, list[float]] = {}
    with (
        record.Record(arguments.record, target=arguments.target) as samples,
        scratch_directory(arguments.target) as directory,
    ):
        monitor = DeviceMonitor(directory)
        safetensors.torch.save_file(state, directory / "s")
        torch.save(state, directory / "t")
        loads = {n: a for n, a in arms(directory).items() if re.search(arguments.only, n)}
        order = random.Random(0)
        for turn in range(arguments.rounds):
            for name in order.sample(list(loads), len(loads)):
                settle(directory, monitor)
                cold = make_cold(directory / file for file in "st")
                if cold.resident_fraction > 0.01:
                    raise SystemExit(f"{name}: {cold.resident_fraction:.1%} not cold")
                began, cpu = time.perf_counter(), time.process_time()
                found = loads[name]()
                look(found)
                elapsed_s, own_s = time.perf_counter() - began, time.process_time() - cpu
                rates.setdefault(name, []).append(size / elapsed_s)
                cpu_s.setdefault(name, []).append(own_s / (size / GIB))
                samples.sample(name, turn, elapsed_s, bytes=size, cpu_s=own_s)
                for key, tensor in state.items():
                    if not torch.equal(found[key].view(torch.int16), tensor.view(torch.int16)):
                        raise SystemExit(f"{name}: wrong bytes in {key}")
                del found
            print(f"round {turn + 1} of {arguments.rounds} done", flush=True)
    for name in sorted(rates, key=lambda n: (n.split()[0], statistics.median(cpu_s[n]))):
        each = " ".join(f"{rate / MIB:5.0f}" for rate in sorted(rates[name]))
        middle, cpu = statistics.median(rates[name]) / MIB, sorted(cpu_s[name])
        print(
            f"{name:46} {middle:6.0f} MiB/s  {statistics.median(cpu):.3f} CPU s/GiB "
            f"({cpu[0]:.3f}-{cpu[-1]:.3f})   {each}"
        )


if __name__ == "__main__":
    main()
