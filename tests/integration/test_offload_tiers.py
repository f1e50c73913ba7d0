"""Checkpointer(offload=optimizer, tiers=[Remote(...)]): the pinned generation is copied too, and a
restore without the optimizer's directory reads it back into a new one."""

import secrets
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
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
from support.tiers import damage, events, settled, until

import iobench
from iobench.checkpoint.store import DirectoryStore
from iobench.errors import DataMismatchError, OptionError, StateMismatchError, UsageError
from iobench.offload import Adam, AdamW
from iobench.offload.files import read_layout
from iobench.offload.layout import BLOCK, read_records
from iobench.remote.journal import tiers_status

pytestmark = pytest.mark.filterwarnings("ignore:step .. the optimizer is read:RuntimeWarning")

_STEPS = 6
_STATE = "optimizer-state"


@pytest.fixture(scope="module")
def expected() -> list[list[dict[str, Any]]]:
    """The snapshots of the stock training after each step, which was never interrupted."""
    return stock_snapshots(_STEPS)


@pytest.fixture(params=["directory", "bucket"])
def remote(request, server, tmp_path) -> Iterator[iobench.Remote]:
    """A remote tier in a directory, and in a bucket of a real server process."""
    if request.param == "directory":
        yield iobench.Remote(tmp_path / "remote", keep=iobench.KeepLast(3))
        return
    with server.active():
        yield iobench.Remote(
            f"{server.target}/run-{secrets.token_hex(4)}", keep=iobench.KeepLast(3)
        )


@contextmanager
def _opened(
    directory: Path, remote: iobench.Remote, *, pins: int = 3, keep: int = 2
) -> Iterator[tuple[AdamW, iobench.Checkpointer]]:
    """A training with its Checkpointer, and with a new directory for the optimizer."""
    state = directory / "state"
    shutil.rmtree(state, ignore_errors=True)
    options: Any = {**VALUES, **OPTIONS, "pins": pins}
    optimizer = AdamW(make_parameters(), state, **options)
    with (
        optimizer,
        iobench.Checkpointer(
            directory / "runs", keep=iobench.KeepLast(keep), offload=optimizer, tiers=[remote]
        ) as ckpt,
    ):
        yield optimizer, ckpt


def _train(optimizer: AdamW, ckpt: iobench.Checkpointer, last: int) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(optimizer.updates, last):
        optimizer.zero_grad()
        give_gradients(parameters, step)
        optimizer.step()
        ckpt.save_async({"step": step + 1}, step + 1)


def test_another_machine_goes_on(tmp_path, remote, expected) -> None:
    """Neither the checkpoints nor the optimizer's files are left: both come from the remote tier,
    also in chunks of another size, and the bits are those of a training without an interruption."""
    with _opened(tmp_path / "a", remote) as (optimizer, ckpt):
        _train(optimizer, ckpt, 4)
        ckpt.wait(until="remote")
        until(lambda: settled(ckpt))
        assert ckpt.steps() == [2, 3, 4]  # the retention of each tier is its own
    shutil.rmtree(tmp_path / "a")
    parameters = make_parameters(9)
    with (
        AdamW(parameters, tmp_path / "b", memory="32MiB", chunk_elements=2048, pins=3) as optimizer,
        iobench.Checkpointer(
            tmp_path / "runs", keep=iobench.KeepLast(2), offload=optimizer, tiers=[remote]
        ) as ckpt,
    ):
        with pytest.warns(RuntimeWarning, match="step 4: the optimizer is read from"):
            assert ckpt.load() == {"step": 4}
        assert optimizer.updates == optimizer.durable() == 4
        assert_equal(snapshot(optimizer), expected[3])
        _train(optimizer, ckpt, 6)
        ckpt.wait(until="remote")
    assert_equal_after(tmp_path / "b", expected[5])
    assert held(tmp_path / "b").keys() >= set(named(tmp_path / "runs").values())


def assert_equal_after(directory: Path, wanted: list) -> None:
    """What is durable in `directory` has the bits of `wanted`."""
    with AdamW.resume(make_parameters(9), directory, memory="32MiB") as optimizer:
        assert_equal(snapshot(optimizer), wanted)


def test_the_files_of_the_optimizer_are_lost(tmp_path, expected) -> None:
    """The local checkpoint names a pin that is gone: its copy has the state. A newer one that was
    not copied is damaged, and is told."""
    remote = iobench.Remote(tmp_path / "remote")
    with _opened(tmp_path, remote) as (optimizer, ckpt):
        _train(optimizer, ckpt, 3)
        ckpt.wait(until="remote")
    manifest = DirectoryStore(tmp_path / "remote").manifest(3)
    assert manifest == DirectoryStore(tmp_path / "runs").manifest(3)
    (file,) = manifest.pinned[0].files
    assert (tmp_path / "remote" / "step-3" / _STATE).stat().st_size == file.size_bytes
    assert not (tmp_path / "runs" / "step-3" / _STATE).exists()
    assert tiers_status(tmp_path / "runs").checkpoints[-1].optimizer_bytes == file.size_bytes
    with pytest.raises(UsageError, match="has its optimizer in"):
        iobench.load_checkpoint(tmp_path / "remote", 3)
    with _opened(tmp_path, remote) as (optimizer, ckpt):
        with pytest.warns(RuntimeWarning, match="the optimizer is read from"):
            assert ckpt.load(2) == {"step": 2}
        assert_equal(snapshot(optimizer), expected[1])
        _train(optimizer, ckpt, 4)
        assert_equal(snapshot(optimizer), expected[3])
        ckpt.wait(until="remote")
        assert ckpt.load(4) == {"step": 4}
    damage(tmp_path / "remote" / "step-4" / _STATE)
    with (
        pytest.raises(DataMismatchError, match="the checksum of chunk 3 differs"),
        _opened(tmp_path, remote) as (optimizer, ckpt),
    ):
        ckpt.load(4)
    with _opened(tmp_path, remote) as (optimizer, ckpt):
        with pytest.warns(RuntimeWarning):
            assert ckpt.load(on_corrupt="previous") == {"step": 3}
        assert_equal(snapshot(optimizer), expected[2])


def test_a_state_that_does_not_fit(tmp_path) -> None:
    """Another optimizer or model is one error, and the state that is there stays."""
    remote = iobench.Remote(tmp_path / "remote")
    with _opened(tmp_path, remote) as (optimizer, ckpt):
        _train(optimizer, ckpt, 1)
        ckpt.wait(until="remote")
    shutil.rmtree(tmp_path / "runs")
    options: Any = {"memory": "1MiB", "chunk_elements": 1024, "pins": 3}
    others = [
        (Adam(make_parameters(), tmp_path / "adam", **options), "has the state of AdamW"),
        (AdamW(make_parameters()[:2], tmp_path / "less", **options), "unexpected"),
    ]
    for other, message in others:
        keep = iobench.KeepLast(2)
        with (
            other,
            iobench.Checkpointer(
                tmp_path / "runs", keep=keep, offload=other, tiers=[remote]
            ) as ckpt,
            pytest.raises((UsageError, StateMismatchError), match=message),
        ):
            ckpt.load()


def test_saves_wait_for_copies_when_no_pin_is_left(tmp_path) -> None:
    """The pins of checkpoints that were not read back yet are held: a save waits for one."""
    remote = iobench.Remote(tmp_path / "remote", bandwidth_limit="256KiB")
    with _opened(tmp_path, remote, keep=1, pins=2) as (optimizer, ckpt):
        _train(optimizer, ckpt, 4)
        assert len(held(tmp_path / "state")) <= 2
        ckpt.wait()
        steps = DirectoryStore(tmp_path / "runs").steps()
        assert set(named(tmp_path / "runs")) == set(steps)
        assert len(steps) <= 2
        ckpt.wait(until="remote")
    assert len(DirectoryStore(tmp_path / "remote").steps()) >= 3


def test_a_remote_tier_that_fails_holds_no_pins(tmp_path) -> None:
    """The copies of the oldest checkpoints are given up, with a warning; training goes on."""
    there = tmp_path / "remote"
    with (
        warnings.catch_warnings(record=True) as told,
        _opened(tmp_path, iobench.Remote(there), keep=1, pins=2) as (optimizer, ckpt),
    ):
        warnings.simplefilter("always")
        _train(optimizer, ckpt, 1)
        ckpt.wait(until="remote")
        shutil.rmtree(there)
        there.write_text("a file in the way")
        _train(optimizer, ckpt, 5)
        ckpt.wait()
        assert ckpt.saves[-1].status == "committed"
    assert any("the optimizer has no pin left" in str(one.message) for one in told)
    assert held(tmp_path / "state").keys() >= set(named(tmp_path / "runs").values())


def _block(optimizer: AdamW, ckpt: iobench.Checkpointer, there: Path) -> None:
    """Copy the first step, and let the remote tier fail from then on."""
    _train(optimizer, ckpt, 1)
    ckpt.wait(until="remote")
    until(lambda: settled(ckpt))
    shutil.rmtree(there)
    there.write_text("a file in the way")


def test_no_copy_may_be_given_up(tmp_path) -> None:
    """With `every_save`, a save that finds no pin left while the remote tier fails is one error."""
    there = tmp_path / "remote"
    remote = iobench.Remote(there, every_save=True)
    with (
        warnings.catch_warnings(action="ignore", category=RuntimeWarning),
        _opened(tmp_path, remote, keep=1, pins=2) as (optimizer, ckpt),
    ):
        _block(optimizer, ckpt, there)
        with pytest.raises(UsageError, match="belong to checkpoints"):
            _train(optimizer, ckpt, 5)
        assert optimizer.updates == 4
    assert DirectoryStore(tmp_path / "runs").steps() == [2, 3]
    assert set(named(tmp_path / "runs").values()) == held(tmp_path / "state").keys()


def test_slots_that_are_damaged_before_they_are_copied(tmp_path) -> None:
    """The copy is `failed`, and is not sent again. What is right of it stays in both tiers."""
    there, state = tmp_path / "remote", tmp_path / "state"
    with (
        warnings.catch_warnings(action="ignore", category=RuntimeWarning),
        _opened(tmp_path, iobench.Remote(there)) as (optimizer, ckpt),
    ):
        _block(optimizer, ckpt, there)
        _train(optimizer, ckpt, 2)
    layout = read_layout(state)
    slot = int(read_records(state, layout)[0].rows[0]["slot"])
    with (state / "state").open("r+b") as file:
        file.seek(layout.offset("state", 0, slot) + BLOCK)
        file.write(b"damage")
    there.unlink()
    with (
        warnings.catch_warnings(record=True) as told,
        AdamW.resume(make_parameters(), state) as optimizer,
        iobench.Checkpointer(
            tmp_path / "runs",
            keep=iobench.KeepLast(2),
            offload=optimizer,
            tiers=[iobench.Remote(there)],
        ) as ckpt,
    ):
        warnings.simplefilter("always")
        until(
            lambda: [one.step for one in events(tmp_path / "runs", "failed") if one.step > 0] == [2]
        )
        ckpt.wait(until="remote")
    assert any("step 2 is not copied to" in str(one.message) for one in told)
    assert DirectoryStore(there).steps() == [1, 2]


def test_what_does_not_go_together(tmp_path) -> None:
    """One error each, and nothing is left open."""
    remote = iobench.Remote(tmp_path / "remote")
    options: Any = {**VALUES, **OPTIONS, "pins": 3}
    with AdamW(make_parameters(), tmp_path / "state", **options) as optimizer:
        keep: Any = {"keep": iobench.KeepLast(1), "offload": optimizer}
        with pytest.raises(OptionError, match="not with placement"):
            iobench.Checkpointer(
                tmp_path / "runs", tiers=[remote], placement=iobench.Placement(), **keep
            )
        with pytest.raises(OptionError, match="takes tiers="):
            iobench.Checkpointer(tmp_path / "runs", tiers=[iobench.Memory("1MiB"), remote], **keep)
