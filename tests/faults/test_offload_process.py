"""The engine in a process of its own: the same bits, and the death of either side."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.offload_training import (
    OPTIONS,
    VALUES,
    assert_equal,
    give_gradients,
    make_parameters,
    snapshot,
    stock_snapshots,
)
from support.preloaded import Preloaded, run_preloaded

from iobench.errors import DataMismatchError, TargetError, TransferError, UsageError
from iobench.offload import AdamW

_STEPS = 5

_TRAINER = """
import os, sys, time
from pathlib import Path
import torch
from support.offload_training import OPTIONS, VALUES, give_gradients, make_parameters
from iobench.offload import AdamW
torch.set_num_threads(1)
parameters = make_parameters()
optimizer = AdamW(parameters, sys.argv[1], engine="process", **VALUES, **OPTIONS)
os.write(1, f"{optimizer._engine._child.pid}\\n".encode())
for step in range(1000000):
    give_gradients(parameters, step)
    optimizer.step()
    os.write(1, f"{optimizer.durable()}\\n".encode())
"""


@pytest.fixture(scope="module", autouse=True)
def _begun() -> Iterator[None]:
    """One thread of torch; and the process that forks others has begun, with its socket here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    run_preloaded(["-c", "pass"])
    yield
    torch.set_num_threads(before)


def _train(optimizer: AdamW, steps: range) -> None:
    parameters = optimizer.param_groups[0]["params"]
    for step in steps:
        give_gradients(parameters, step)
        optimizer.step()


def _gone(pid: int) -> bool:
    for _ in range(600):
        if not Path(f"/proc/{pid}").exists():
            return True
        if Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] == "Z":
            return True
        time.sleep(0.1)
    return False


def test_same_bits(tmp_path: Path) -> None:
    """Steps, pins, a parameter without a gradient that the trainer changes; then a resume, and
    work on the whole state between two steps, for which the child ends and starts again."""
    expected = stock_snapshots(_STEPS)
    parameters = make_parameters()
    with AdamW(parameters, tmp_path, engine="process", **VALUES, **OPTIONS) as optimizer:
        with pytest.raises(UsageError, match="nothing to pin"):
            optimizer.pin(0)
        _train(optimizer, range(3))
        optimizer.pin(3, {"seen": 3})
        optimizer.wait(3)
        assert optimizer.durable() == optimizer.updates == 3
        for parameter, one in zip(parameters, expected[2], strict=True):
            assert torch.equal(parameter, one["model"])
        parameters[1].grad = None
        with torch.no_grad():
            parameters[1].add_(1)
        changed = parameters[1].detach().clone()
        optimizer.step()
        assert torch.equal(parameters[1], changed)
        child = optimizer._engine._child.pid
    assert _gone(child)
    parameters = make_parameters(1)
    with AdamW.resume(parameters, tmp_path) as optimizer:
        assert torch.equal(parameters[1], changed)
    with AdamW.resume(make_parameters(1), tmp_path, step=3, engine="process") as optimizer:
        assert optimizer.restored.extra == {"seen": 3}
        _train(optimizer, range(3, 4))
        assert_equal(snapshot(optimizer), expected[3])
        _train(optimizer, range(4, _STEPS))
    with AdamW.resume(make_parameters(1), tmp_path) as optimizer:
        assert_equal(snapshot(optimizer), expected[_STEPS - 1])


def test_the_engine_dies(tmp_path: Path) -> None:
    """The trainer's next call names the signal; resume has what was durable."""
    expected = stock_snapshots(2)
    optimizer = AdamW(make_parameters(), tmp_path, engine="process", **VALUES, **OPTIONS)
    _train(optimizer, range(2))
    optimizer.wait()
    os.kill(optimizer._engine._child.pid, signal.SIGKILL)
    with pytest.raises(TransferError, match=r"the engine process \d+ has ended by signal 9"):
        _train(optimizer, range(2, 3))
    with pytest.raises(TransferError, match="has failed: the engine process"):
        optimizer.durable()
    with pytest.raises(TransferError, match="has failed"):
        optimizer.close()
    with AdamW.resume(make_parameters(1), tmp_path) as again:
        assert_equal(snapshot(again), expected[1])


def test_the_trainer_dies(tmp_path: Path) -> None:
    """Its engine ends too, and has lost nothing that was reported as durable."""
    with Preloaded(["-c", _TRAINER, tmp_path], stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        child = int(trainer.stdout.readline())
        durable = 0
        while durable < 3:
            durable = int(trainer.stdout.readline())
        trainer.kill()
    assert _gone(child)
    with AdamW.resume(make_parameters(1), tmp_path, verify=True) as optimizer:
        assert optimizer.updates >= durable
        assert not optimizer.restored.passed_over
        expected = stock_snapshots(optimizer.updates)
        assert_equal(snapshot(optimizer), expected[-1])


def test_errors_of_the_engine(tmp_path: Path) -> None:
    """Damage that the child finds is the trainer's error, of its class. Both hold the lock."""
    with AdamW(make_parameters(), tmp_path, **VALUES, **OPTIONS) as optimizer:
        _train(optimizer, range(2))
        optimizer.pin(2)
    with (tmp_path / "state").open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        for offset in range(4096 + 100, size, 8192):  # every slot
            file.seek(offset)
            file.write(b"damage")
    optimizer = AdamW.resume(make_parameters(1), tmp_path, engine="process")
    with pytest.raises(TargetError, match="is in use"):
        AdamW.resume(make_parameters(1), tmp_path)
    with pytest.raises(DataMismatchError, match="chunk 0 differs from its checksum"):
        _train(optimizer, range(2, 3))
    with pytest.raises(TransferError, match="has failed"):
        optimizer.close()
    with pytest.raises(DataMismatchError, match="generation 1 was overwritten"):
        AdamW.resume(make_parameters(1), tmp_path)
