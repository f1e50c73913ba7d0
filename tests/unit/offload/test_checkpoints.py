"""Checkpointer(offload=optimizer): manifests name pinned generations; retention releases them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.offload_checkpoints import held, named
from support.offload_training import (
    OPTIONS,
    VALUES,
    assert_equal,
    give_gradients,
    make_parameters,
    snapshot,
    stock_snapshots,
)

import iobench
from iobench.checkpoint.store import DirectoryStore
from iobench.errors import DataMismatchError, OptionError, TransferError, UsageError
from iobench.offload import AdamW
from iobench.offload.store import GenerationStore
from iobench.ranks.world import World
from iobench.writers.buffered import BufferedWriter

_STEPS = 6
_MEMORY = OPTIONS["memory"]


@pytest.fixture(scope="module")
def expected() -> list[list[dict[str, Any]]]:
    """The snapshots of the stock training after each step."""
    return stock_snapshots(_STEPS)


@contextmanager
def _opened(
    directory: Path, *, pins: int = 3, keep: int = 2, **options: Any
) -> Iterator[tuple[AdamW, iobench.Checkpointer]]:
    """A new or continued training with its Checkpointer."""
    state: Any = directory / "state"
    if state.exists():
        optimizer = AdamW.resume(make_parameters(9), state, memory=_MEMORY)
    else:
        chosen: Any = {**VALUES, **OPTIONS, "pins": pins}
        optimizer = AdamW(make_parameters(), state, **chosen)
    with (
        optimizer,
        iobench.Checkpointer(
            directory / "runs", keep=iobench.KeepLast(keep), offload=optimizer, **options
        ) as ckpt,
    ):
        yield optimizer, ckpt


def _train(optimizer: AdamW, until: int) -> None:
    for step in range(optimizer.updates, until):
        give_gradients(optimizer.param_groups[0]["params"], step)
        optimizer.step()


@pytest.mark.parametrize("way", ["save", "save_async"])
def test_load_gives_state_model_and_optimizer(way: str, tmp_path: Path, expected: list) -> None:
    """Each kept checkpoint has the bits of its step, and training goes on from there."""
    with _opened(tmp_path) as (optimizer, ckpt):
        for step in (1, 2, 3):
            _train(optimizer, step)
            getattr(ckpt, way)({"step": step}, step)
            ckpt.wait()
        assert ckpt.steps() == [2, 3]
        _train(optimizer, 4)
        assert ckpt.load(2) == {"step": 2}
        assert_equal(snapshot(optimizer), expected[1])
        _train(optimizer, 5)
        assert_equal(snapshot(optimizer), expected[4])
        assert held(tmp_path / "state").keys() == set(named(tmp_path / "runs").values())
    with _opened(tmp_path) as (optimizer, ckpt):
        assert optimizer.updates == 5
        assert ckpt.load() == {"step": 3}
        assert_equal(snapshot(optimizer), expected[2])
    manifest = DirectoryStore(tmp_path / "runs").manifest(3)
    assert manifest.offload is not None
    assert manifest.offload.updates == 3
    assert manifest.offload.directory == str(tmp_path / "state")


def test_what_resume_took_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load of the generation that the optimizer has leaves it alone, unless it was changed."""
    with _opened(tmp_path) as (optimizer, ckpt):
        _train(optimizer, 1)
        ckpt.save({}, 1)
    opened: list[Path] = []
    real = GenerationStore.open
    with _opened(tmp_path) as (optimizer, ckpt):
        monkeypatch.setattr(
            GenerationStore, "open", lambda path, *how: (opened.append(path), real(path, *how))[1]
        )
        ckpt.load()
        assert opened == []
        before = snapshot(optimizer)
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].add_(1)
        ckpt.load()
        assert len(opened) == 1
        assert_equal(snapshot(optimizer), before)
    monkeypatch.undo()
    with _opened(tmp_path) as (optimizer, ckpt):  # another state after as many updates
        other = optimizer.state_dict()
        other["state"][0]["exp_avg"].zero_()
        optimizer.load_state_dict(other)
        ckpt.load()
        assert_equal(snapshot(optimizer), before)


def test_pins_of_saves_that_came_to_nothing_are_released(tmp_path: Path) -> None:
    """Dropped and failed saves, and removed checkpoints, keep no generation."""
    with _opened(tmp_path) as (optimizer, ckpt):
        for step in range(1, 6):
            _train(optimizer, step)
            ckpt.save_async({"step": step}, step)
        ckpt.wait()
        assert {save.status for save in ckpt.saves} <= {"committed", "dropped"}
        kept = ckpt.steps()
        ckpt.remove(kept[0])
        optimizer.wait()
        assert [pin.step for pin in held(tmp_path / "state").values()] == kept[1:]


def test_pins_without_a_manifest_are_released_at_the_next_start(tmp_path: Path) -> None:
    """What a crash between pin and manifest leaves; the pins of another directory stay."""
    with _opened(tmp_path) as (optimizer, ckpt):
        _train(optimizer, 1)
        ckpt.save({}, 1)
        _train(optimizer, 2)
        ckpt.save({}, 2)
    shutil.rmtree(tmp_path / "runs" / "step-1")
    shutil.copytree(tmp_path / "runs", tmp_path / "others")
    state = tmp_path / "state"
    with AdamW.resume(make_parameters(), state, memory=_MEMORY) as optimizer:
        keep = iobench.KeepLast(1)
        with iobench.Checkpointer(tmp_path / "new", keep=keep, offload=optimizer) as ckpt:
            optimizer.wait()
            assert [pin.step for pin in held(state).values()] == [1, 2]
            _train(optimizer, 3)
            ckpt.save({}, 3)
            _train(optimizer, 4)
            with pytest.raises(UsageError, match="all pins=3 of the offloaded optimizer belong"):
                ckpt.save({}, 4)
            with pytest.raises(UsageError, match="all pins=3 belong to checkpoints"):
                optimizer.pin(7)
    with _opened(tmp_path) as (optimizer, _):
        optimizer.wait()
        assert [pin.step for pin in held(state).values()] == [2, 3]


def test_a_step_that_is_saved_again(tmp_path: Path, expected: list) -> None:
    """The old generation of the step goes only when the new checkpoint is there."""
    with _opened(tmp_path) as (optimizer, ckpt):
        _train(optimizer, 1)
        ckpt.save({}, 1)
        _train(optimizer, 2)
        ckpt.save({"time": 1}, 2)
        first = named(tmp_path / "runs")[2]
        ckpt.load(1)
        _train(optimizer, 2)
        ckpt.save({"time": 2}, 2)
        assert named(tmp_path / "runs")[2] != first
        ckpt.wait()
        optimizer.wait()
        assert held(tmp_path / "state").keys() == set(named(tmp_path / "runs").values())
        assert ckpt.load(2) == {"time": 2}
        assert_equal(snapshot(optimizer), expected[1])


def test_damage_of_a_pinned_generation(tmp_path: Path, expected: list) -> None:
    """It is damage of its checkpoint: the one before is loaded where that is asked for."""
    with _opened(tmp_path) as (optimizer, ckpt):
        for step in (1, 2):
            _train(optimizer, step)
            ckpt.save({"step": step}, step)
        _train(optimizer, 3)
    store = GenerationStore.open(tmp_path / "state")
    record = next(one for one in store.records() if one.updates == 2)
    offset = store.layout.offset("parameters", 3, int(record.rows[3]["slot"]))
    store.close()
    with (tmp_path / "state" / "parameters").open("r+b") as file:
        file.seek(offset)
        file.write(b"damage")
    with _opened(tmp_path) as (optimizer, ckpt):
        with pytest.raises(DataMismatchError, match=r"generation 2 is damaged: .*chunk 3"):
            ckpt.load(2)
        with pytest.warns(RuntimeWarning, match="step 2 is skipped"):
            assert ckpt.load(on_corrupt="previous") == {"step": 1}
        assert_equal(snapshot(optimizer), expected[0])


def test_a_checkpoint_needs_both_parts(tmp_path: Path) -> None:
    """With and without offload, the other kind of checkpoint is refused and names the remedy."""
    with _opened(tmp_path) as (optimizer, ckpt):
        _train(optimizer, 1)
        ckpt.save({}, 1)
    remedy = r"offload=AdamW\.resume\(parameters, directory\)"
    with pytest.raises(UsageError, match=remedy):
        iobench.load_checkpoint(tmp_path / "runs")
    with (
        iobench.Checkpointer(tmp_path / "runs") as without,
        pytest.raises(UsageError, match=remedy),
    ):
        without.load()
    with iobench.Checkpointer(tmp_path / "plain") as plain:
        plain.save({}, 1)
    with (
        AdamW.resume(make_parameters(), tmp_path / "state", memory=_MEMORY) as optimizer,
        iobench.Checkpointer(
            tmp_path / "plain", keep=iobench.KeepLast(1), offload=optimizer
        ) as ckpt,
        pytest.raises(DataMismatchError, match="saved without an offloaded optimizer"),
    ):
        ckpt.load()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": iobench.KeepLast(3)}, "pins=3 and the Checkpointer keeps 3; it needs one pin"),
        ({}, "keeps all checkpoints"),
        ({"keep": iobench.KeepLast(1), "tiers": ["x"]}, "takes tiers="),
    ],
)
def test_options_that_do_not_fit(options: Any, message: str, tmp_path: Path) -> None:
    """Too few pins are an error of the construction, and leave the directory free."""
    with AdamW(make_parameters(), tmp_path / "state", **VALUES, **OPTIONS, pins=3) as optimizer:
        with pytest.raises(OptionError, match=message):
            iobench.Checkpointer(tmp_path / "runs", offload=optimizer, **options)
        with pytest.raises(OptionError, match=r"takes an optimizer of iobench\.offload"):
            iobench.Checkpointer(tmp_path / "runs", offload="adam")
        with iobench.Checkpointer(
            tmp_path / "runs", offload=optimizer, keep=iobench.KeepLast(2)
        ) as ckpt:
            with pytest.raises(UsageError, match="nothing to pin before the first call of step"):
                ckpt.save({}, 1)
            assert ckpt.saves[-1].status == "failed"
            _train(optimizer, 1)
            ckpt.save({}, 1)


def test_a_failure_of_the_engine_makes_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save fails, the trainer is told, and the checkpoint before loads."""
    with _opened(tmp_path) as (optimizer, ckpt):
        _train(optimizer, 1)
        ckpt.save({"step": 1}, 1)

    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    with ExitStack() as stack:
        optimizer, ckpt = stack.enter_context(_opened(tmp_path))
        _train(optimizer, 2)
        monkeypatch.setattr(GenerationStore, "pin", fail)
        save = ckpt.save_async({"step": 2}, 2)
        with pytest.raises(TransferError, match="the offload engine has failed"):
            ckpt.wait()
        assert save.status == "failed"
        with pytest.raises(TransferError, match="the offload engine has failed"):
            stack.close()
    monkeypatch.undo()
    with _opened(tmp_path) as (optimizer, ckpt):
        assert ckpt.steps() == [1]
        assert ckpt.load() == {"step": 1}


def test_the_files_of_a_checkpoint_hold_no_optimizer(tmp_path: Path) -> None:
    """A checkpoint writes the small state; the generation is in place already."""
    with _opened(tmp_path, writer=BufferedWriter()) as (optimizer, ckpt):
        _train(optimizer, 1)
        state_bytes = sum(one.numel() for one in optimizer.param_groups[0]["params"]) * 14
        saved = ckpt.save({"step": 1}, 1)
        assert saved.size_bytes < 1000 < state_bytes


def test_a_job_of_several_ranks(tmp_path: Path) -> None:
    """An error at once that says what to do; it waits for no other rank."""
    ranks = {"rank": 0, "size": 2, "local_rank": 0, "local_size": 2, "node": 0, "nodes": 1}
    world = World(**ranks, host="here", job="job", launcher="torchrun")
    keep = iobench.KeepLast(1)
    with AdamW(make_parameters(), tmp_path / "state", **OPTIONS, pins=3) as optimizer:
        with pytest.raises(OptionError, match="this job has 2 ranks, and the parameters are not"):
            iobench.Checkpointer(tmp_path / "runs", keep=keep, offload=optimizer, world=world)
        assert not (tmp_path / "runs").exists()
        options = {"keep": keep, "offload": optimizer, "world": "alone"}
        with iobench.Checkpointer(tmp_path / "runs", **options) as ckpt:
            _train(optimizer, 1)
            ckpt.save({}, 1)
            assert ckpt.steps() == [1]
