"""TrialRunner on a real directory: the bytes that it counts are those that its writers get."""

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from iobench import workloads
from iobench.bench.choose import target_of
from iobench.bench.targets import base
from iobench.checkpointer.checkpointer import Checkpointer
from iobench.tune import trial_runner as rig_module
from iobench.tune.objective import Objective, Step
from iobench.tune.space import Candidate
from iobench.tune.trial_runner import TrialRunner
from iobench.units import MIB
from iobench.writers.buffered import BufferedWriter
from iobench.writers.local.directory_lock import LOCK

SIZE = 6 * MIB


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each write that `buffered` gets."""
    sizes: list[int] = []
    for name in ("write", "write_many"):
        stock = getattr(BufferedWriter, name)

        def counting(self: BufferedWriter, *args: Any, stock: Any = stock, **how: Any) -> Any:
            moved = stock(self, *args, **how)
            sizes.append(moved.bytes)
            return moved

        monkeypatch.setattr(BufferedWriter, name, counting)
    return sizes


@pytest.fixture
def rig(tiny_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrialRunner]:
    """A rig for stalls, not waiting for the device between trials."""
    monkeypatch.setattr(base, "settled", lambda *_: nullcontext())
    with TrialRunner(
        target=target_of(str(target), []),
        workload=workloads.load(str(tiny_path)),
        rank=0,
        objective=Objective(goal="stall"),
        seed=1,
        pool_bytes=16 * MIB,
    ).running(0.0) as made:
        yield made


@pytest.mark.parametrize("verify", [False, True])
def test_every_copy_of_a_stall_is_counted(rig, given, verify: bool) -> None:
    """Five checkpoints in the background, and one more if a trial is also verified."""
    candidate = Candidate.of("buffered", {}, "drawn")
    step = Step(phase="confirm", round=1, size_bytes=SIZE, verify=verify)
    rig(candidate, step)  # with its warm-up
    before = sum(given)
    measured = rig(candidate, step)
    assert measured.error is None
    assert measured.written_bytes == pytest.approx(sum(given) - before, rel=0.02)


@pytest.mark.parametrize("broken", [False, True])
def test_a_trial_leaves_no_checkpoint(rig, monkeypatch, broken) -> None:
    """Also after a stall that fails half-way: the next trial has the same free space."""
    if broken:
        saves = iter([True, True, False])
        stock = Checkpointer.save_async

        def failing(self: Checkpointer, *given: Any, **how: Any) -> Any:
            if not next(saves):
                raise OSError("the third save fails")
            return stock(self, *given, **how)

        monkeypatch.setattr(Checkpointer, "save_async", failing)
    step = Step(phase="confirm", round=1, size_bytes=SIZE, verify=True)
    measured = rig(Candidate.of("buffered", {}, "drawn"), step)
    assert (measured.error is not None) is broken
    assert rig.opened.scratch.directory is not None
    assert os.listdir(rig.opened.scratch.directory) == [LOCK]


def test_writers_used_last_keep_their_memory(rig, monkeypatch) -> None:
    """The warm-up of a new writer is counted. Above the limit the oldest writer is dropped."""
    monkeypatch.setattr(rig_module, "_KEPT_WRITERS", 2)
    a, b, c = (
        Candidate.of("buffered", values, "drawn")
        for values in ({}, {"fallocate": False}, {"block_size": MIB})
    )
    step = Step(phase="race", round=1, size_bytes=SIZE)
    written = [rig(one, step).written_bytes for one in (a, b, a, c, a, b)]
    warm = min(written)
    assert [size - warm for size in written] == [
        rig_module.warm_up_bytes(SIZE) * new for new in (1, 1, 0, 1, 0, 1)
    ]


def test_the_data_of_a_tuning_is_not_memory_of_its_first_setting(target: Path) -> None:
    """The first trial of each size has its random bytes made; --max-memory counts the writer."""
    with TrialRunner(
        target=target_of(str(target), []),
        workload=workloads.load("llama7b"),
        rank=0,
        objective=Objective(),
        seed=1,
        pool_bytes=128 * MIB,
    ).running(0.0) as runner:
        step = Step(phase="probe", round=1, size_bytes=128 * MIB)
        measured = runner(Candidate.of("buffered", {}, "drawn"), step)
    assert measured.error is None
    if measured.memory_bytes is None:
        pytest.skip("this kernel does not reset the maximum of the resident memory")
    assert measured.memory_bytes < 64 * MIB
