r"""Writers, fio and stock tools side by side: saves durable, restores cold, arms in random order.

    python benchmarks/side_by_side.py --target DIRECTORY [--size 4GiB] [--rounds 5] [--only REGEX] \
        [--record FILE]

Prints the median of every arm, and each ratio of two arms that has a limit, with the ratios of the
rounds. "in place" is a restore into memory that has the file's layout, which direct reads fill
without a copy. DeepSpeed's aio_handle takes part if it is installed.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import record
import torch

from iobench import linux
from iobench.bench import fio
from iobench.bench.targets.cold import make_cold
from iobench.bench.targets.scratch import scratch_directory
from iobench.bench.targets.settle import settle
from iobench.environment import DeviceMonitor
from iobench.formats import torch_file
from iobench.formats.torch_settings import crc32_setting
from iobench.units import GIB, MIB, parse_size
from iobench.writers.blocks.pages import fresh_pages
from iobench.writers.config import load_writer
from iobench.writers.image import FileImage
from iobench.writers.registry import make

TENSORS = 64
WRITERS = ["hybrid", "uring", "odirect", "uncached", "buffered"]
STREAM = "odirect"
DEEPSPEED = "deepspeed aio_handle"


class Bench:
    """The arms of one benchmark, the tensors they move, and the rates they reached."""

    def __init__(self, directory: Path, size: int, samples: record.Record) -> None:
        self.directory, self.size, self.samples = directory, size, samples
        self.monitor = DeviceMonitor(directory)
        self.saves: dict[str, Callable[[], float | None]] = {}
        self.restores: dict[str, tuple[str, Callable[[], float | None]]] = {}
        random_bytes = np.random.default_rng()
        each = size // TENSORS // 4
        self.state = {f"layer.{i}.weight": torch.empty(each) for i in range(TENSORS)}
        for tensor in self.state.values():
            tensor.view(torch.uint8).copy_(
                torch.from_numpy(random_bytes.integers(0, 256, each * 4, np.uint8))
            )
        self.into = {name: torch.zeros_like(tensor) for name, tensor in self.state.items()}
        self.laid_out = fresh_pages(each * 4 * TENSORS, huge=True)  # as the file has it
        self.laid_out[:: linux.PAGE] = 1
        self.rates: dict[str, list[float]] = {}
        self.cpu_s: dict[str, list[float]] = {}

    def path(self, name: str) -> Path:
        return self.directory / name

    def image(self, name: str, tensors: dict[str, torch.Tensor]) -> FileImage:
        return FileImage.of(name, [t.view(torch.uint8).numpy() for t in tensors.values()])

    def same(self, found: dict[str, torch.Tensor]) -> None:
        for name, tensor in self.state.items():
            if not torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)):
                raise SystemExit(f"{name}: wrong bytes")

    def same_laid_out(self) -> None:
        begin = 0
        for name, tensor in self.state.items():
            wanted = tensor.view(torch.uint8).numpy()
            if self.laid_out[begin : begin + len(wanted)].tobytes() != wanted.tobytes():
                raise SystemExit(f"{name}: wrong bytes in place")
            begin += len(wanted)

    def run(self, rounds: int, seed: int) -> None:
        order = random.Random(seed)
        for turn in range(rounds):
            names = list(self.saves)
            order.shuffle(names)
            for name in names:
                settle(self.directory, self.monitor)
                self._time(f"save {name}", turn, self.saves[name])
                for label, (source, restore) in self.restores.items():
                    if source == name:
                        settle(self.directory, self.monitor)
                        cold = make_cold(p for p in self.directory.iterdir() if p.name != "lock")
                        if cold.resident_fraction > 0.01:
                            raise SystemExit(f"{label}: {cold.resident_fraction:.1%} not cold")
                        self._time(f"restore {label}", turn, restore)
                for left in self.directory.iterdir():
                    if left.name != "lock":
                        shutil.rmtree(left) if left.is_dir() else left.unlink()
            print(f"round {turn + 1} of {rounds} done", flush=True)

    def _time(self, name: str, turn: int, call: Callable[[], float | None]) -> None:
        began, cpu = time.perf_counter(), time.process_time()
        own = call()
        seconds = time.perf_counter() - began if own is None else own
        cpu_s = time.process_time() - cpu
        self.cpu_s.setdefault(name, []).append(cpu_s)
        self.rates.setdefault(name, []).append(self.size / seconds)
        self.samples.sample(name, turn, seconds, bytes=self.size, cpu_s=cpu_s)

    def best(self, pattern: str) -> str:
        names = [name for name in self.rates if re.fullmatch(pattern, name)]
        return max(names, key=lambda name: statistics.median(self.rates[name]), default="")

    def report(self) -> None:
        for name in sorted(
            self.rates, key=lambda n: (n.split()[0], -statistics.median(self.rates[n]))
        ):
            rates = self.rates[name]
            each = " ".join(f"{rate / MIB:6.0f}" for rate in sorted(rates))
            cpu = statistics.median(self.cpu_s.get(name, [0.0])) / (self.size / GIB)
            shown = f"{cpu:5.2f} CPU s/GiB" if cpu and "fio" not in name else " " * 15
            print(f"{name:44} {statistics.median(rates) / MIB:6.0f} MiB/s {shown}   {each}")

    def compare_cpu(self, writer: str, over: str, operations: Sequence[str], target: float) -> None:
        """CPU time of the `operations` together, as "save %s", by one writer over another."""
        arms = [[operation % name for operation in operations] for name in (writer, over)]
        if all(arm in self.cpu_s for arm in arms[0] + arms[1]):
            one, other = (sum(statistics.median(self.cpu_s[a]) for a in found) for found in arms)
            verdict = "ok  " if one / other <= target else "MISS"
            what = " + ".join(operations) % ((writer,) * len(operations))
            print(f"{verdict} {one / other:5.2f} (<= {target})  CPU of {what} / {over}")

    def compare(self, what: str, over: str, target: float) -> None:
        one, other = self.best(what), self.best(over)
        if not one or not other:
            print(f"not measured: {what} / {over}")
            return
        ratio = statistics.median(self.rates[one]) / statistics.median(self.rates[other])
        pairs = [a / b for a, b in zip(self.rates[one], self.rates[other], strict=True)]
        spread = " ".join(f"{pair:.2f}" for pair in sorted(pairs))
        verdict = "ok  " if ratio >= target else "MISS"
        print(f"{verdict} {ratio:5.2f} (>= {target})  {one} / {other}   by round: {spread}")


def add_writers(bench: Bench) -> None:
    for spec in WRITERS:
        writer = load_writer(spec)

        def save(writer=writer) -> None:
            writer.write(bench.image("image", bench.state), bench.directory)

        def restore(writer=writer) -> None:
            writer.read(bench.image("image", bench.into), bench.directory)

        def in_place(writer=writer) -> None:
            writer.read(FileImage.of("image", [bench.laid_out]), bench.directory)

        bench.saves[spec] = save
        bench.restores[spec] = (spec, restore)
        bench.restores[f"{spec} in place"] = (spec, in_place)


def add_fio(bench: Bench) -> None:
    for job in fio.JOBS:

        def save(job=job) -> float:
            return fio.run_job(job, "save", bench.directory, bench.size).elapsed_s

        def restore(job=job) -> float:
            return fio.run_job(job, "restore", bench.directory, bench.size).elapsed_s

        bench.saves[f"fio {job.name}"] = save
        bench.restores[f"fio {job.name}"] = (f"fio {job.name}", restore)


def add_torch(bench: Bench) -> None:
    file, writer = bench.path("t.pt"), make(STREAM)

    def stock() -> None:
        torch.save(bench.state, file)
        linux.sync_file(file)

    def streamed(crc: bool) -> Callable[[], None]:
        def save() -> None:
            with crc32_setting(crc), writer.open(file) as stream:
                torch.save(bench.state, stream)

        return save

    def as_image() -> None:
        torch_file.save(bench.state, file.name, bench.directory, writer)

    def load() -> float:
        began = time.perf_counter()
        found = torch.load(file)
        seconds = time.perf_counter() - began
        bench.same(found)
        return seconds

    def load_streamed() -> float:
        began = time.perf_counter()
        found, _ = torch_file.load(file.name, bench.directory, writer)
        seconds = time.perf_counter() - began
        bench.same(found)
        return seconds

    bench.saves["torch.save + fsync"] = stock
    bench.saves[f"torch.save to {STREAM}, no CRC"] = streamed(crc=False)
    bench.saves[f"torch.save to {STREAM}, CRC"] = streamed(crc=True)
    bench.saves[f"torch_file.save by {STREAM}"] = as_image
    bench.restores["torch.load"] = ("torch.save + fsync", load)
    bench.restores[f"torch_file.load by {STREAM}"] = ("torch.save + fsync", load_streamed)


def add_deepspeed(bench: Bench) -> None:
    try:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        handle = (
            AsyncIOBuilder()
            .load()
            .aio_handle(
                block_size=8 * MIB,
                queue_depth=32,
                single_submit=False,
                overlap_events=True,
                intra_op_parallelism=2,
            )
        )
    except Exception as error:  # noqa: BLE001 -- a build that fails raises whatever it likes
        print(f"DeepSpeed aio_handle does not take part: {error}")
        return
    pinned = handle.new_cpu_locked_tensor(bench.size, torch.empty(0, dtype=torch.uint8))
    pinned.random_(0, 255)
    file = str(bench.path("ds"))

    def save() -> None:
        handle.sync_pwrite(pinned, file, 0)
        linux.sync_file(file)

    bench.saves[DEEPSPEED] = save
    bench.restores[DEEPSPEED] = (
        DEEPSPEED,
        lambda: (handle.sync_pread(pinned, file, 0), None)[1],
    )


def memory_speed(bench: Bench) -> None:
    """The null writer against one thread's copy to memory as large as the state."""
    writer, image = make("null"), bench.image("image", bench.state)
    copies, nulls = [], []
    for _ in range(5):
        began = time.perf_counter()
        for name, tensor in bench.state.items():
            np.copyto(bench.into[name].numpy(), tensor.numpy())
        copies.append(bench.size / (time.perf_counter() - began))
        nulls.append(writer.write(image, bench.directory).rate_bytes_per_s)
    bench.rates["null writer"], bench.rates["memcpy"] = nulls, copies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--size", type=parse_size, default="4GiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="arms whose name matches this")
    record.add_option(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with (
        record.Record(arguments.record, target=arguments.target) as samples,
        scratch_directory(arguments.target) as directory,
    ):
        bench = Bench(directory, arguments.size, samples)
        memory_speed(bench)
        for add in (add_writers, add_fio, add_torch):
            add(bench)
        if re.search(arguments.only, DEEPSPEED):  # to import it is to compile for minutes
            add_deepspeed(bench)
        bench.saves = {n: s for n, s in bench.saves.items() if re.search(arguments.only, n)}
        bench.run(arguments.rounds, seed=0)
        bench.same(bench.into)
        bench.same_laid_out()
    bench.report()
    ours, jobs = r"(odirect|uncached)[^ ]*", "fio .*"
    bench.compare(f"save {ours}", f"save {jobs}", 0.97)
    bench.compare(f"save {ours}", r"save torch\.save \+ fsync", 5.0)
    bench.compare(f"save {ours}", "save deepspeed.*", 1.0)
    bench.compare("save torch.save to .*, no CRC", f"save {jobs}", 0.9)
    bench.compare("save torch.save to .*, CRC", r"save torch\.save \+ fsync", 3.0)
    bench.compare(f"restore {ours}", f"restore {jobs}", 1.0)
    bench.compare(f"restore {ours}", r"restore torch\.load", 2.5)
    bench.compare(r"restore torch_file\.load.*", r"restore torch\.load", 2.5)
    bench.compare("save uring", f"save {jobs}", 1.0)
    bench.compare("restore uring", f"restore {jobs}", 1.0)
    for operation in ("save", "restore"):
        single = f"{operation} (uring|odirect|uncached|buffered)"
        bench.compare(f"{operation} hybrid", f"{operation} {jobs}", 1.0)
        bench.compare(f"{operation} hybrid", single, 0.97)
    for writer in ("odirect", "uring", "hybrid"):
        for operations in (
            ["save %s"],
            ["restore %s"],
            ["restore %s in place"],
            ["save %s", "restore %s"],
        ):
            bench.compare_cpu(writer, "buffered", operations, 0.2)
    bench.compare("null writer", "memcpy", 0.8)


if __name__ == "__main__":
    main()
