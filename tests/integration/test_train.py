"""`iobench train` as a user calls it: arms, report, record, and what it refuses."""

import json
import os
import signal
import subprocess
import time

import pytest
import torch
from support.preloaded import Preloaded

from iobench.errors import OptionError
from iobench.results import read
from iobench.train.trainer import Gpt, Trainer

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Two that share a busy core wait for each other longer than the tiny model takes."""
SMALL = ("--steps", "4", "--every", "2", "--model-params", "100000")


def test_train(iobench, iobench_inside, tiny_path, target, tmp_path) -> None:
    """Every mode, and stock torch: equal losses, and a record that `show` prints too."""
    record = tmp_path / "run.jsonl"
    writers = ("--writer", "buffered,peer:torch-save,peer:dcp", "--mode", "none,sync,async=1,lazy")
    done = iobench(
        *("train", "-w", tiny_path, "--target", target, "-o", record, "--size", "full"),
        *(*writers, *SMALL, "--repeat", "1", "--format", "json"),
        **ONE_THREAD,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["schema"] == "iobench.train/2"
    arms = {arm["label"]: arm for arm in found["arms"]}
    ours = {"buffered sync", "buffered async=1", "buffered lazy=2"}
    stock = {f"peer:{name} {mode}" for name in ("torch-save", "dcp") for mode in ("sync", "async")}
    assert set(arms) == {"none", *ours, *stock}
    for label, arm in arms.items():
        assert arm["losses_equal"]
        assert (arm["overhead"] is None) == (label == "none")
        assert (arm["saves"], arm["committed"]) == ((0, 0) if label == "none" else (2, 2))
        assert arm["resumed_equal"] is (None if label == "none" else True)
        assert (arm["persist_s"] is None) == (arm["mode"] in ("none", "sync"))
    assert arms["buffered async=1"]["snapshot_bytes_per_s"] > 0
    blocks = read(record).training
    assert [block.order for block in blocks] == [*range(8)]
    for block in blocks:
        assert len(block.step_s) == len(block.persisting) == 4
        assert [save.step for save in block.saves] == ([] if block.mode == "none" else [1, 3])
        assert block.wall_s >= sum(block.step_s) + sum(save.stall_s for save in block.saves)
    assert not any(target.iterdir())
    shown = iobench_inside("show", record)
    assert shown.returncode == 0
    assert "peer:torch-save async" in shown.stdout
    assert "left out  peer:torch-save has no lazy mode" in done.stderr


def test_turns(iobench_inside, tiny_path, target, tmp_path) -> None:
    """A B, then B A; each overhead is that of the pairs of one repetition."""
    record = tmp_path / "run.jsonl"
    done = iobench_inside(
        *("train", "-w", tiny_path, "--target", target, "-o", record, "--size", "full", *SMALL),
        *("--writer", "buffered", "--mode", "sync", "--repeat", "2", "--format", "md"),
    )
    assert done.returncode == 0, done.stderr
    blocks = read(record).training
    assert [block.mode for block in blocks] == ["none", "sync", "sync", "none"]
    assert [(block.repetition, block.order) for block in blocks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [block.resumed_equal for block in blocks] == [None, True, None, None]
    assert "| buffered sync |" in done.stdout


@pytest.mark.parametrize("every", ["2xpersist", "3.5%"])
def test_pace(every, iobench_inside, tiny_path, target, tmp_path) -> None:
    """The interval comes from saves measured before, and blocks have whole intervals."""
    record = tmp_path / "run.jsonl"
    done = iobench_inside(
        *("train", "-w", tiny_path, "--target", target, "-o", record, "--size", "full"),
        *("--model-params", "100000", "--writer", "buffered", "--mode", "async", "--repeat", "1"),
        *("--steps", "2", "--every", every),
    )
    assert done.returncode == 0, done.stderr
    plan = read(record).run.plan
    assert plan["every_asked"] == every
    assert plan["every"] >= 1
    assert plan["steps"] % plan["every"] == 1 % plan["every"]
    assert f"{every}, found before: buffered async=2 persisted in" in done.stdout
    _, block = read(record).training
    assert [save.step for save in block.saves] == list(range(1, plan["steps"], plan["every"]))
    assert not any(target.iterdir())


def test_a_model_beyond_the_size(iobench_inside, tiny_path, target) -> None:
    command = ("train", "-w", tiny_path, "--target", target, "--size", "full")
    done = iobench_inside(*command, "--model-params", "5000000")
    assert done.returncode == 2
    assert "choose a smaller model" in done.stderr.splitlines()[-1]
    assert not any(target.iterdir())


@pytest.mark.parametrize("params", [100_000, 1_000_000, 124_000_000])
def test_size(params: int) -> None:
    """The model has about the requested number of parameters, from a certain size on."""
    with torch.device("meta"):
        model = Gpt.of_size(params)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(params, rel=0.15)
    with pytest.raises(OptionError, match="at least 100000"):
        Gpt.of_size(10)


def test_learns() -> None:
    """It is real training: the loss falls."""
    trainer = Trainer(300_000)
    losses = [trainer.step(lambda: None) for _ in range(30)]
    assert losses[-1] < losses[0] - 0.5


def test_interrupted(tiny_path, target, tmp_path) -> None:
    """Ctrl-C between blocks: exit code 130, an empty target, and the record says so. What was
    measured is printed."""
    record = tmp_path / "run.jsonl"
    command = (
        *("-m", "iobench", "train", "-w", tiny_path, "--target", target),
        *("-o", record, "--size", "full", "--steps", "20", "--every", "10"),
        *("--mode", "async", "--writer", "buffered", "--model-params", "100000"),
        *("--repeat", "1000"),
    )
    environment = os.environ | ONE_THREAD
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Preloaded(command, **pipes, env=environment) as process:
        assert process.stderr
        while not (record.exists() and record.read_bytes().count(b"\n") > 2):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        table, printed = process.communicate()
    assert process.returncode == 130, printed
    assert not any(target.iterdir())
    end = read(record).end
    assert end.status == "interrupted"
    assert "buffered" in table
    assert printed.splitlines()[-2:] == [
        f"record: {record}",
        "iobench: interrupted; temporary files are removed",
    ]
