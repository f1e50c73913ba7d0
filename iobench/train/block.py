"""Block: a timed series of training steps from the start, with the checkpoints of one arm."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import xxhash

from iobench.bench.counters.sampler import FileSampler
from iobench.results import TrainBlock, utc_now
from iobench.stats.estimates import highest
from iobench.train.arm import Arm
from iobench.train.saver import Saver, saver_for
from iobench.train.trainer import Trainer

GAUGES = ("/proc/meminfo", "/proc/{pid}/status")
"""The files that a sampler of blocks reads: dirty pages, resident memory of the process `pid`."""


@dataclass(frozen=True, kw_only=True)
class TrainingBlocks:
    """Runs blocks, one at a time, all with one trainer.

    `simulated_s` is the shortest time of a step. A shorter step sleeps for the rest, like a CPU
    that waits for a GPU. A checkpoint is taken after the first of every `every` steps, so that it
    has time to become durable within the block. No checkpoint is taken after the last step.
    """

    trainer: Trainer
    steps: int
    every: int
    simulated_s: float
    size_bytes: int
    sampler: FileSampler
    run_id: str

    @cached_property
    def reference(self) -> tuple[list[float], str]:
        """Every loss of training without checkpoints, and a digest of the state at the end."""
        self.trainer.rewind()
        return [self.trainer.step() for _ in range(self.steps)], self._digest()

    def run(self, arm: Arm, directory: Path, repetition: int, order: int) -> TrainBlock:
        """Run one block of `arm`, with its checkpoints in the new `directory`.

        One more checkpoint is taken before the clock starts: it allocates the slots and runs all
        code once. In the first repetition training then goes on from the last checkpoint. Both are
        compared with `reference`.
        """
        expected = self.reference  # not timed
        saver = saver_for(arm, directory)
        try:
            warm_up(self.trainer, saver)
            warm = len(saver.saves())
            started_at, began_s = utc_now(), time.perf_counter()
            losses, step_s, persisting = self._train(saver)
            saver.wait()
            ended_s = time.perf_counter()
            readings = [texts for _, texts in self.sampler.texts(began_s, ended_s)]
            equal = (losses, self._digest()) == expected
            resumed = self._resumed(saver) if arm.by and not repetition else None
            return TrainBlock(
                run_id=self.run_id,
                repetition=repetition,
                order=order,
                writer=arm.writer,
                options=arm.options,
                mode=arm.mode,
                slots=arm.slots,
                budget_bytes=arm.budget_bytes,
                bytes=self.size_bytes,
                wall_s=ended_s - began_s,
                step_s=tuple(step_s),
                persisting=tuple(persisting),
                saves=saver.saves()[warm:],
                peak_memory_bytes=highest(_field(status, "VmRSS:") for _, status in readings),
                peak_dirty_bytes=highest(_field(meminfo, "Dirty:") for meminfo, _ in readings),
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
            if (step - 1) % self.every == 0 and step < self.steps:
                saver.save(self.trainer.state(), step)
        return losses, step_s, persisting

    def _resumed(self, saver: Saver) -> bool:
        """Return whether the steps after the last checkpoint give the same results, bit for bit."""
        self.trainer.rewind()
        self.trainer.resume(saver.load())
        (expected, digest), done = self.reference, self.trainer.steps_done
        losses = [self.trainer.step() for _ in range(done, self.steps)]
        return losses == expected[done:] and self._digest() == digest

    def _digest(self) -> str:
        digest = xxhash.xxh3_128()
        for tensor in _tensors(self.trainer.state()):
            flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            digest.update(flat.numpy().data)
        return digest.hexdigest()


class _Pause:
    """Called between backward and update: sleeps the simulated rest, then waits for a copy.

    The time for forward and backward is `simulated_s`, the time of a whole step, less the update.
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

    It is taken after a step, which creates the optimizer's state. So it is as large as the later
    ones.
    """
    trainer.rewind()
    trainer.step()
    saver.save(trainer.state(), 0)
    saver.before_update()
    saver.wait()
    trainer.rewind()


def timed_step(trainer: Trainer, saver: Saver, simulated_s: float) -> tuple[float, float]:
    """Train one step; return its loss, and its seconds without the wait for `saver`.

    A simulated step lasts `simulated_s` as a whole. An update that is slower than the fastest one
    so far prolongs the step: a background save that competes for the CPU has this effect.
    """
    pause = _Pause(saver, max(0.0, simulated_s - trainer.update_s))
    loss = trainer.step(pause)
    rest_s = pause.began_s + simulated_s + pause.stall_s - time.perf_counter()
    if rest_s > 0:
        time.sleep(rest_s)
    return loss, time.perf_counter() - pause.began_s - pause.stall_s


def _tensors(state: object) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _tensors(value)


def _field(text: str, name: str) -> int | None:
    """Return the bytes of a field in kB, from the text of a /proc file on one line."""
    words = text.split()
    return int(words[words.index(name) + 1]) * 1024 if name in words else None
