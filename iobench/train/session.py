"""Session: training with and without checkpoints, in interleaved blocks, and its record."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from iobench.bench.counters.sampler import FileSampler
from iobench.bench.targets.base import OpenTarget
from iobench.bench.targets.directory import DirectoryTarget
from iobench.environment.memory import available_bytes
from iobench.errors import OptionError, TargetError, UsageError
from iobench.results import (
    Environment,
    ResultWriter,
    Run,
    WorkloadFacts,
    config_hash,
    new_run_id,
    utc_now,
)
from iobench.results.result_file import RunProgress
from iobench.stats.estimates import median
from iobench.train.arm import Arm
from iobench.train.block import GAUGES, TrainingBlocks
from iobench.train.pace import Pace, probe, whole_intervals
from iobench.train.trainer import Trainer
from iobench.units import MIB, count_of, format_seconds, format_size, parse_size
from iobench.verification.imported import load_workload
from iobench.workloads.workload import Workload

_MEMCPY_BYTES, _MEMCPY_ROUNDS = 256 * MIB, 5


def memcpy_bytes_per_s(size_bytes: int) -> float:
    """Return the rate of copies between allocated buffers.

    It is the better of torch, with all threads, and numpy, with one. Each is the median of 5 copies
    of 256 MiB, or of `size_bytes` where that is less.
    """
    count = min(size_bytes, _MEMCPY_BYTES)
    source, copy = torch.ones(count, dtype=torch.uint8), torch.ones(count, dtype=torch.uint8)
    into, out_of = copy.numpy(), source.numpy()

    def by_numpy() -> None:
        into[:] = out_of

    ways: Sequence[Callable[[], object]] = (lambda: copy.copy_(source), by_numpy)
    return count / min(median([_timed(way) for _ in range(_MEMCPY_ROUNDS)]) for way in ways)


def _timed(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


_BYTES_PER_PARAM = 12  # fp32 weights, and AdamW's two moments
_FEWEST = 2  # steps of a block
_ON_STORAGE = 2  # checkpoints at a time: the last one, and the one being written


@dataclass(frozen=True, kw_only=True)
class Session:
    """A training to measure. `size_bytes` is the size of a checkpoint: `workload`'s shard, scaled.

    A block has `steps` steps. Where `pace` is measured, it has whole intervals with at least
    `steps` steps and `intervals` intervals. `simulated_s` is the shortest time of a step; 0 for a
    step that is not simulated.
    """

    workload: Workload
    full_bytes: int
    size_bytes: int
    arms: tuple[Arm, ...]
    left_out: tuple[str, ...]
    target: DirectoryTarget
    steps: int
    pace: Pace
    intervals: int
    repeat: int
    model_params: int
    simulated_s: float
    step_scaled: bool
    device: str

    def lines(self) -> list[str]:
        """Return the plan in words, before anything is measured."""
        scale = f", {self.workload.scale.text}" if self.workload.scale else ""
        step = format_seconds(self.simulated_s) if self.simulated_s else "as long as it takes"
        blocks = count_of(self.repeat, "block")
        least = "" if self.pace.steps else "at least "
        return [
            f"workload  {self.workload.name}, rank 0: checkpoints of "
            f"{format_size(self.size_bytes)} of {format_size(self.full_bytes)}{scale}",
            f"arms      {', '.join(arm.label for arm in self.arms)}",
            *(f"left out  {line}" for line in self.left_out),
            f"target    {self.target.location}",
            f"train     {blocks} of {least}{self.steps} steps for each arm, checkpoints every "
            f"{self.pace}, a step {step}",
        ]

    def run(self, results: ResultWriter, progress: RunProgress) -> None:
        """Write the run's header and a record per block. Nothing stays in the target.

        The arms take turns in the order A B C, then C B A, so that a drift affects them alike. The
        record of a block says whether its losses differ. Raises what a writer raises, which ends
        the run.
        """
        progress.begin(1 + len(self.arms) * self.repeat)
        progress.step("preparing")
        trainer = self._trainer()
        steps, every, probed = self._rhythm(trainer)
        trainer.change_in_parts(every if self.simulated_s else 1)
        run = self._header(steps, every, probed)
        results.write(run)
        files = [name.format(pid=os.getpid()) for name in GAUGES]
        opening = OpenTarget.of(self.target, sampled=False)
        with opening as opened, FileSampler(files) as sampler:
            blocks = TrainingBlocks(
                trainer=trainer,
                steps=steps,
                every=every,
                simulated_s=self.simulated_s,
                size_bytes=self.size_bytes,
                sampler=sampler,
                run_id=run.run_id,
            )
            for repetition in range(self.repeat):
                arms = self.arms if repetition % 2 == 0 else self.arms[::-1]
                for order, arm in enumerate(arms):
                    progress.step(arm.label)
                    with opened.settled():
                        pass
                    directory = Path(opened.scratch.locate(f"{repetition}-{order}"))
                    block = blocks.run(arm, directory, repetition, order)
                    results.write(block)
                    progress.result(block)
                    if arm.by is not None:
                        shutil.rmtree(directory)

    def _trainer(self) -> Trainer:
        trainer = Trainer(self.model_params, device=self.device)
        own = _BYTES_PER_PARAM * sum(one.numel() for one in trainer.model.parameters())
        if own > self.size_bytes:
            raise OptionError(
                f"--model-params {self.model_params}: its state is {format_size(own)} and --size "
                f"{format_size(self.size_bytes)}; choose a smaller model"
            )
        return Trainer(
            self.model_params,
            device=self.device,
            ballast_bytes=self.size_bytes - own,
            threads=1 if self.simulated_s else None,
        )

    def _rhythm(self, trainer: Trainer) -> tuple[int, int, dict[str, Any] | None]:
        """Return the steps of a block and of an interval, and the probe for them if there is one.

        It is asked for, or that from saves of the first background arm.
        """
        if self.pace.steps is not None:
            return self.steps, self.pace.steps, None
        arm = next(arm for arm in self.arms if arm.background)
        every = 1
        with self.target.scratch() as scratch:
            # The interval sets the part of the ballast that a simulated step changes. So the probe
            # runs again with the right part.
            for _ in range(2 if self.simulated_s else 1):
                trainer.change_in_parts(every)
                directory = Path(scratch.locate("probe"))
                found = probe(trainer, arm, directory, self.simulated_s)
                shutil.rmtree(directory)
                every = self.pace.steps_for(found)
        steps = whole_intervals(max(self.steps, self.intervals * every), every)
        return steps, every, {"arm": arm.label, **asdict(found)}

    def _header(self, steps: int, every: int, probed: dict[str, Any] | None) -> Run:
        machine, storage = self.target.describe()
        asked = {
            "verb": "train",
            "arms": [arm.label for arm in self.arms],
            "steps": steps,
            "every": every,
            "every_asked": str(self.pace),
            "probe": probed,
            "repeat": self.repeat,
            "model_params": self.model_params,
            "simulated_s": self.simulated_s,
            "simulates_whole_step": True,
            "step_scaled": self.step_scaled,
            "device": self.device,
            "seed": 0,
        }
        scale = self.workload.scale
        return Run(
            run_id=new_run_id(),
            started_at=utc_now(),
            command=("iobench", *sys.argv[1:]),
            config_hash=config_hash(asked),
            environment=Environment(machine=machine, storage=storage),
            workload=WorkloadFacts(
                name=self.workload.name,
                fingerprint=self.workload.fingerprint,
                rank=0,
                bytes=self.size_bytes,
                full_bytes=self.full_bytes,
                files=1,
                scaled=scale is not None,
                scale=scale.text if scale else None,
            ),
            plan=asked | {"memcpy_bytes_per_s": memcpy_bytes_per_s(self.size_bytes)},
        )


def make_session(
    *,
    workload: str,
    arms: Sequence[Arm],
    left_out: Sequence[str] = (),
    target: Path,
    size: str,
    steps: int,
    every: str,
    intervals: int = 0,
    repeat: int,
    model_params: int,
    simulate_step: bool,
    scale_step: bool = False,
    device: str = "cpu",
) -> Session:
    """Return a checked session: writers work in the target, memory and space suffice.

    With `scale_step` the simulated step is scaled by the same factor as the checkpoint. So saves
    take the same share of time as at full size. `intervals` is the least number of intervals of a
    block where `every` is measured. Raises UsageError and its subclasses, and
    UnavailableError.
    """
    pace = Pace.parse(every)
    _check_options(pace, arms, steps, device)
    full = load_workload(workload)
    step_s = _published_step_s(full) if simulate_step else 0.0
    scaled = full if size == "full" else full.scaled(parse_size(size, "--size"))
    place = DirectoryTarget(path=target)
    place.check()
    for arm in arms:
        if arm.by is not None:
            arm.by.check_scheme(target)
            arm.by.require(target)
    size_bytes, full_bytes = scaled.size_bytes(), full.size_bytes()
    session = Session(
        workload=scaled,
        full_bytes=full_bytes,
        size_bytes=size_bytes,
        arms=tuple(arms),
        left_out=tuple(left_out),
        target=place,
        steps=steps,
        pace=pace,
        intervals=intervals,
        repeat=repeat,
        model_params=model_params,
        simulated_s=step_s * size_bytes / full_bytes if scale_step else step_s,
        step_scaled=scale_step,
        device=device,
    )
    _check_room(session)
    return session


def _check_options(pace: Pace, arms: Sequence[Arm], steps: int, device: str) -> None:
    if pace.steps and steps < pace.steps:
        raise OptionError(f"--steps {steps}: fewer than --every {pace}")
    if steps < _FEWEST:
        raise OptionError(f"--steps {steps}: a checkpoint needs a step before and after it")
    if device == "cuda" and not torch.cuda.is_available():
        raise OptionError("--device cuda: torch sees no CUDA device here")
    if pace.steps is None and not any(arm.background for arm in arms):
        raise OptionError(f"--every {pace} measures a background save: add async to --mode")


def _published_step_s(workload: Workload) -> float:
    if workload.step_time is None:
        raise UsageError(
            f"--simulate-step: workload {workload.name!r} has no published step time; "
            "iobench workloads show names it for those that have one"
        )
    return workload.step_time.seconds


def _check_room(session: Session) -> None:
    """Check memory for the state, an arm's copies and a resume, and space for two checkpoints."""
    size_bytes = session.size_bytes
    needed = 2 * size_bytes + max(arm.memory_bytes(size_bytes) for arm in session.arms)
    available = available_bytes()
    if available is not None and needed > available:
        raise OptionError(
            f"--size {format_size(size_bytes)} needs {format_size(needed)} of memory and "
            f"{format_size(available)} are available; choose a smaller --size or fewer slots"
        )
    checkpoints, free = _ON_STORAGE, session.target.free_bytes()
    if any(arm.keeps_all for arm in session.arms):
        checkpoints += session.intervals or session.steps // (session.pace.steps or 1)
    stored = checkpoints * size_bytes
    if free is not None and stored > free and any(arm.by for arm in session.arms):
        raise TargetError(
            f"--target {session.target.location}: {format_size(free)} are free and "
            f"{format_size(stored)} needed; choose a smaller --size"
        )
