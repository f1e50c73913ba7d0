"""A block: some steps of training from the start, with the checkpoints of one arm, timed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from iobench.bench.counters.sampler import FileSampler
from iobench.results import TrainBlock, utc_now
from iobench.train.arm import Arm
from iobench.train.saver import Saver, saver_for
from iobench.train.trainer import Trainer

__all__ = ["GAUGES", "Reference", "TrainingBlocks", "due", "timed_step", "warm_up"]

GAUGES = ("/proc/meminfo", "/proc/{pid}/status")
"""What a sampler of blocks reads: dirty pages, resident memory of the process `pid`."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What training gives without checkpoints: every loss, and a digest of the state at the end."""

    losses: tuple[float, ...]
    digest: str


@dataclass(frozen=True, kw_only=True)
class TrainingBlocks:
    """Runs blocks, one at a time, all with one trainer.

    `simulated_s` is how long a step takes at least: the rest is slept, as a CPU whose
    GPU computes does. Checkpoints are taken after the first of every `every` steps, so that each
    has time to become durable within the block, and none after the last step.
    """

    trainer: Trainer
    steps: int
    every: int
    simulated_s: float
    size_bytes: int
    sampler: FileSampler
    run_id: str

    def reference(self) -> Reference:
        """Return the losses and the state of training without checkpoints; not timed."""
        self.trainer.rewind()
        losses = tuple(self.trainer.step() for _ in range(self.steps))
        return Reference(losses=losses, digest=self._digest())

    def run(
        self,
        arm: Arm,
        directory: Path,
        reference: Reference,
        *,
        repetition: int,
        order: int,
        resume: bool,
    ) -> TrainBlock:
        """One block of `arm`, its checkpoints in the new `directory`.

        One more checkpoint is taken before the clock starts: slots are there then, and code has
        run once. With `resume` training goes on from the last one afterwards, and is compared.
        """
        saver = saver_for(arm, directory)
        try:
            warm_up(self.trainer, saver)
            warm = len(saver.saves())
            started_at, began_s = utc_now(), time.perf_counter()
            losses, step_s, persisting = self._train(saver)
            saver.wait()
            ended_s = time.perf_counter()
            memory, dirty = self._peaks(began_s, ended_s)
            equal = tuple(losses) == reference.losses and self._digest() == reference.digest
            resumed = self._resumed(saver, reference) if resume and arm.by else None
            return TrainBlock(
                run_id=self.run_id,
                repetition=repetition,
                order=order,
                writer=arm.writer,
                options=arm.options,
                mode=arm.mode,
                slots=arm.slots,
                bytes=self.size_bytes,
                wall_s=ended_s - began_s,
                step_s=tuple(step_s),
                persisting=tuple(persisting),
                saves=saver.saves()[warm:],
                peak_memory_bytes=memory,
                peak_dirty_bytes=dirty,
                losses_equal=equal,
                resumed_equal=resumed,
                started_at=started_at,
            )
        finally:
            saver.close()

    def _train(self, saver: Saver) -> tuple[list[float], list[float], list[bool]]:
        losses, step_s, persisting = [], [], []
        for step in range(1, self.steps + 1):
            before = saver.persisting
            loss, seconds = timed_step(self.trainer, saver, self.simulated_s)
            losses.append(loss)
            step_s.append(seconds)
            persisting.append(before or saver.persisting)
            if due(step, self.every) and step < self.steps:
                saver.save(self.trainer.state(), step)
        return losses, step_s, persisting

    def _resumed(self, saver: Saver, reference: Reference) -> bool:
        """Whether what comes after the last checkpoint comes again, bit for bit."""
        self.trainer.rewind()
        self.trainer.resume(saver.load())
        done = self.trainer.steps_done
        losses = tuple(self.trainer.step() for _ in range(done, self.steps))
        return losses == reference.losses[done:] and self._digest() == reference.digest

    def _digest(self) -> str:
        """Of every tensor of the state, in its order."""
        digest = xxhash.xxh3_128()
        for tensor in _tensors(self.trainer.state()):
            flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            digest.update(flat.numpy().data)
        return digest.hexdigest()

    def _peaks(self, since_s: float, until_s: float) -> tuple[int | None, int | None]:
        """Resident memory and dirty pages, the highest readings; None without any."""
        readings = [texts for _, texts in self.sampler.texts(since_s, until_s)]
        memory = [_field(status, "VmRSS:") for _, status in readings]
        dirty = [_field(meminfo, "Dirty:") for meminfo, _ in readings]
        return _highest(memory), _highest(dirty)


class _Pause:
    """What happens between backward and update: the simulated rest, then the wait for a copy.

    Forward and backward get what the update leaves of `simulated_s`, the time of a whole step.
    """

    def __init__(self, saver: Saver, simulated_s: float) -> None:
        self._saver, self._simulated_s = saver, simulated_s
        self.began_s = time.perf_counter()
        self.stall_s = 0.0

    def __call__(self) -> None:
        rest_s = self.began_s + self._simulated_s - time.perf_counter()
        if rest_s > 0:
            time.sleep(rest_s)
        waiting_s = time.perf_counter()
        self._saver.before_update()
        self.stall_s = time.perf_counter() - waiting_s


def warm_up(trainer: Trainer, saver: Saver) -> None:
    """Take a first checkpoint, of step 0, and go back to the start.

    It is as large as those that follow: after a step, which gives the optimizer its state.
    """
    trainer.rewind()
    trainer.step()
    saver.save(trainer.state(), 0)
    saver.before_update()
    saver.wait()
    trainer.rewind()


def timed_step(trainer: Trainer, saver: Saver, simulated_s: float) -> tuple[float, float]:
    """Train one step; return its loss, and its seconds without what it waited for `saver`.

    A simulated step lasts `simulated_s` as a whole. An update that takes longer than it ever did
    prolongs the step, as a background save that competes for the CPU does.
    """
    pause = _Pause(saver, max(0.0, simulated_s - trainer.update_s))
    loss = trainer.step(pause)
    rest_s = pause.began_s + simulated_s + pause.stall_s - time.perf_counter()
    if rest_s > 0:
        time.sleep(rest_s)
    return loss, time.perf_counter() - pause.began_s - pause.stall_s


def due(step: int, every: int) -> bool:
    """Whether a checkpoint is taken after `step`, counted from 1: after the first of `every`."""
    return (step - 1) % every == 0


def _tensors(state: object) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _tensors(value)


def _field(text: str, name: str) -> int | None:
    """Bytes of a field in kB, from a file of /proc on one line."""
    words = text.split()
    return int(words[words.index(name) + 1]) * 1024 if name in words else None


def _highest(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
