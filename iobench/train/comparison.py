"""OptimizerComparison: the same training by several optimizers, in turns."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from iobench.bench.counters.monitor import Usage
from iobench.bench.targets.cold import make_cold
from iobench.bench.targets.directory import DirectoryTarget
from iobench.bench.targets.entries import FilesBelow
from iobench.environment.device import DeviceMonitor
from iobench.environment.memory import available_bytes
from iobench.errors import OptionError, TargetError
from iobench.linux import trim_heap
from iobench.results import Environment, new_run_id, utc_now
from iobench.train.gpt import CONTEXT, VOCABULARY, Gpt
from iobench.train.optimizer_record import (
    STATE_BYTES,
    MeasuredCheckpoint,
    MeasuredOptimizer,
    MeasuredRestore,
    OptimizerRecord,
)
from iobench.train.optimizers import OPTIMIZERS, ComparedOptimizer
from iobench.units import format_size

__all__ = ["OptimizerComparison"]

_WARM_UP = 4
"""Steps before the clock: each slot of the offloaded state is written once."""
_MOST_STORED = 150
"""Bytes of a parameter on storage: slots (42), mapped files and copies, saves and their next."""
_BATCH = 8


class _Training:
    """A Gpt in bfloat16 and one more parameter with a constant gradient, and their optimizer."""

    def __init__(
        self, name: str, model: Gpt, rest: torch.Tensor, directory: Path, memory: str
    ) -> None:
        self.name, self.model = name, model
        self._rest = torch.nn.Parameter(torch.zeros_like(rest))
        self._rest.grad = rest
        self.parameters = [*model.parameters(), self._rest]
        before = _resident_bytes()
        self.optimizer: ComparedOptimizer = OPTIMIZERS[name](self.parameters, directory, memory)
        self.losses: list[float] = []
        self.step_s: list[float] = []
        self.update_s: list[float] = []
        self.written: list[float] = []
        self.checkpoints: list[MeasuredCheckpoint] = []
        self.restores: list[MeasuredRestore] = []
        self.step()
        self.memory_bytes = max(0, _resident_bytes() - before)
        for step in range(_WARM_UP):
            for method in self.optimizer.methods:
                self.optimizer.checkpoint(method, step)()
            self.step()
        self.optimizer.settle()

    def step(self) -> float:
        """Train on the next batch; return the seconds of the update."""
        for parameter in self.model.parameters():
            parameter.grad = None
        loss = self.model.loss(_tokens(len(self.losses)))
        loss.backward()
        began_s = time.perf_counter()
        self.optimizer.step()
        elapsed_s = time.perf_counter() - began_s
        self.losses.append(float(loss.detach()))
        return elapsed_s

    def block(self, steps: int) -> None:
        before, began_s = Usage.now(), time.perf_counter()
        self.update_s += [self.step() for _ in range(steps)]
        self.optimizer.settle()
        self.step_s.append((time.perf_counter() - began_s) / steps)
        self.written.append((Usage.now() - before).io.get("write_bytes", 0) / steps)

    def checkpoint(self, method: str, repetition: int, monitor: DeviceMonitor) -> None:
        before, device, began_s = Usage.now(), monitor.read(), time.perf_counter()
        wait = self.optimizer.checkpoint(method, len(self.losses))
        stall_s = time.perf_counter() - began_s
        wait()
        durable_s = time.perf_counter() - began_s
        after = monitor.read()
        self.checkpoints.append(
            MeasuredCheckpoint(
                method=method,
                repetition=repetition,
                stall_s=stall_s,
                durable_s=durable_s,
                written_bytes=(Usage.now() - before).io.get("write_bytes", 0),
                device_bytes=(after - device).write_bytes if after and device else None,
            )
        )


@dataclass(frozen=True, kw_only=True)
class OptimizerComparison:
    """`repeat` blocks of `steps` steps by each of `names`, then a checkpoint by each method.

    `size_bytes` is the size of a whole checkpoint, 14 bytes for each parameter. `model_params` of
    them are a small GPT, and one more parameter has the rest. Files are below `target`, which is
    empty again afterwards.
    """

    names: Sequence[str]
    target: DirectoryTarget
    size_bytes: int
    steps: int
    repeat: int
    model_params: int
    memory: str
    seed: int

    @property
    def parameters(self) -> int:
        """Parameters that are trained."""
        return self.size_bytes // STATE_BYTES

    def check(self) -> None:
        """Raise OptionError or TargetError for too little memory or space."""
        self.target.check()
        if self.parameters <= self.model_params:
            raise OptionError(
                f"--size {format_size(self.size_bytes)}: less than the state of --model-params "
                f"{self.model_params}; choose a larger size"
            )
        needed = self.parameters * (20 * len(self.names) + 2 * STATE_BYTES)
        available = available_bytes()
        if available is not None and needed > available:
            raise OptionError(
                f"--size {format_size(self.size_bytes)} needs {format_size(needed)} of memory and "
                f"{format_size(available)} are available; choose a smaller --size"
            )
        stored, free = self.parameters * _MOST_STORED, self.target.free_bytes()
        if free is not None and stored > free:
            raise TargetError(
                f"--target {self.target.location}: {format_size(free)} are free and "
                f"{format_size(stored)} needed; choose a smaller --size"
            )

    def lines(self) -> list[str]:
        """Return the plan in words."""
        return [
            f"train     {self.parameters:,} parameters in bfloat16, checkpoints of "
            f"{format_size(self.size_bytes)}",
            f"arms      {', '.join(self.names)}; {self.repeat} blocks of {self.steps} steps each",
            f"target    {self.target.location}",
        ]

    def run(self, progress: Callable[[str], None]) -> OptimizerRecord:
        """Train; return what was measured. Raises what an optimizer raises."""
        machine, storage = self.target.describe()
        started_at = utc_now()
        return OptimizerRecord(
            run_id=new_run_id(),
            started_at=started_at,
            command=("iobench", *sys.argv[1:]),
            environment=Environment(machine=machine, storage=storage),
            target=self.target.location,
            parameters=self.parameters,
            state_bytes=self.size_bytes,
            steps=self.steps,
            repeat=self.repeat,
            model_params=self.model_params,
            memory=self.memory,
            seed=self.seed,
            optimizers=tuple(self._measure(progress)),
        )

    def _measure(self, progress: Callable[[str], None]) -> list[MeasuredOptimizer]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = Gpt.of_size(self.model_params).to(torch.bfloat16)
        own = sum(one.numel() for one in model.parameters())
        rest = torch.full((max(1, self.parameters - own),), 1e-3, dtype=torch.bfloat16)
        monitor = self.target.monitor()
        with self.target.scratch() as scratch:
            trainings = []
            for name in self.names:
                progress(f"{name}: preparing")
                directory = Path(scratch.locate(name))
                trainings.append(
                    _Training(name, copy.deepcopy(model), rest, directory, self.memory)
                )
            for repetition in range(self.repeat):
                for one in trainings if repetition % 2 == 0 else trainings[::-1]:
                    progress(f"{one.name}: block {repetition + 1}")
                    one.block(self.steps)
                    for method in one.optimizer.methods:
                        one.checkpoint(method, repetition, monitor)
            for one in trainings:
                one.optimizer.close()
            for repetition in range(self.repeat):
                for one in trainings if repetition % 2 == 0 else trainings[::-1]:
                    progress(f"{one.name}: restore {repetition + 1}")
                    for method in one.optimizer.methods:
                        one.restores.append(_restored(one, method, repetition, monitor))
            return [_measured(one, trainings[0].losses) for one in trainings]


def _measured(one: _Training, reference: Sequence[float]) -> MeasuredOptimizer:
    return MeasuredOptimizer(
        name=one.name,
        step_s=tuple(one.step_s),
        update_s=tuple(one.update_s),
        written_bytes_per_step=tuple(one.written),
        memory_bytes=one.memory_bytes,
        checkpoints=tuple(one.checkpoints),
        restores=tuple(one.restores),
        losses_equal=one.losses == list(reference),
    )


def _restored(
    one: _Training, method: str, repetition: int, monitor: DeviceMonitor
) -> MeasuredRestore:
    into = [torch.nn.Parameter(torch.zeros_like(parameter)) for parameter in one.parameters]
    files = one.optimizer.files(method)
    cached = make_cold(FilesBelow(files if files.is_dir() else files.parent)).resident_bytes
    before, device, began_s = Usage.now(), monitor.read(), time.perf_counter()
    end = one.optimizer.restore(method, len(one.losses), into)
    elapsed_s = time.perf_counter() - began_s
    after, used = monitor.read(), Usage.now() - before
    equal = all(map(torch.equal, into, one.parameters))
    end()
    return MeasuredRestore(
        method=method,
        repetition=repetition,
        cached_bytes=cached,
        elapsed_s=elapsed_s,
        read_bytes=used.io.get("read_bytes", 0),
        device_bytes=(after - device).read_bytes if after and device else None,
        equal=equal,
    )


def _tokens(step: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(step)
    walk = torch.randint(-2, 3, (_BATCH, CONTEXT + 1), generator=made).cumsum(dim=1)
    return walk % VOCABULARY


def _resident_bytes() -> int:
    trim_heap()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0
