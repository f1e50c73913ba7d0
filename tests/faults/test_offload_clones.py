"""Pins that are clones, on file systems with reflinks: they take no slots, and keep their bytes."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.offload_kills import STEPS, OffloadKills
from support.offload_training import (
    OPTIONS,
    VALUES,
    Stock,
    assert_equal,
    give_gradients,
    make_parameters,
    snapshot,
    stock_snapshots,
)
from support.preloaded import run_preloaded

import iobench
from iobench import linux
from iobench.errors import DataMismatchError, TransferError
from iobench.offload import AdamW
from iobench.offload.files import read_layout
from iobench.offload.inspect import inspect
from iobench.offload.stock_files import export
from iobench.units import MIB

pytestmark = pytest.mark.root
_SIZE = {"xfs": 320 * MIB, "btrfs": 256 * MIB}


@pytest.fixture(scope="module", autouse=True)
def _begun() -> Iterator[None]:
    """One thread of torch; and the process that forks others has begun."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    run_preloaded(["-c", "pass"])
    yield
    torch.set_num_threads(before)


def _train(optimizer: AdamW, steps: range, *, pin_every: int = 2) -> None:
    parameters = optimizer.param_groups[0]["params"]
    for step in steps:
        give_gradients(parameters, step)
        optimizer.step()
        if not (step + 1) % pin_every:
            optimizer.pin(step + 1, {"step": step + 1})
    optimizer.wait()


def _clones(directory: Path) -> list[str]:
    """The generations that have a clone in both files."""
    found = [re.fullmatch(r"pin-(\d+)\.(\w+)", path.name) for path in directory.iterdir()]
    names = {(one[1], one[2]) for one in found if one}
    generations = sorted({generation for generation, _ in names})
    assert names == {(one, name) for one in generations for name in ("state", "parameters")}
    return generations


@pytest.mark.parametrize(("kind", "engine"), [("xfs", "process"), ("btrfs", "thread")])
def test_clones_keep_their_bytes(
    kind: str, engine: str, new_filesystem: Callable[..., Path], tmp_path: Path
) -> None:
    """Two generations are reserved for two pins. Each pin has its own bytes after later steps, and
    training goes on from one, also with chunks that no step has changed since."""
    state = new_filesystem(kind, _SIZE[kind]) / "state"
    expected = stock_snapshots(7)
    own = {"pins": 2, "clone_pins": True}
    with AdamW(make_parameters(), state, **VALUES, **OPTIONS, **own) as optimizer:
        _train(optimizer, range(7))
        assert_equal(snapshot(optimizer), expected[6])
    layout = read_layout(state)
    assert (layout.clones, layout.slots) == (True, 2)
    assert (state / "state").stat().st_size == 2 * layout.generation_bytes("state")
    assert _clones(state) == ["4", "6"]
    found = inspect(state)
    one = sum(layout.generation_bytes(name) for name in ("state", "parameters"))
    assert (found.cloned_bytes, found.reserved_bytes // one) == (2 * one, 2)
    export(state, 4, tmp_path / "o.pt")
    saved = torch.load(tmp_path / "o.pt")["state"]
    assert torch.equal(saved[0]["exp_avg"], expected[3][0]["exp_avg"])

    stock = Stock(make_parameters())
    for step in range(4):
        give_gradients(stock.model, step)
        stock.step()
    parameters = make_parameters(1)
    with AdamW.resume(parameters, state, step=4, engine=engine, memory="1MiB") as optimizer:
        for step in range(20, 24):  # of one parameter: the other chunks stay in the clone
            for one in (parameters, stock.model):
                give_gradients(one, step)
                for parameter in one[1:]:
                    parameter.grad = None
            optimizer.step()
            stock.step()
            optimizer.pin(step)
        optimizer.wait()
        assert optimizer.pinned() == [22, 23]
    AdamW.resume(make_parameters(2), state, step=22, verify=True).close()
    with AdamW.resume(make_parameters(2), state, verify=True) as optimizer:
        assert_equal(snapshot(optimizer), stock.snapshot())
        _train(optimizer, range(30, 32), pin_every=1)
    assert len(_clones(state)) == 2  # and none of chunks that have changed


def test_damage_of_a_clone(new_filesystem: Callable[..., Path]) -> None:
    """A flipped bit in a pin: an error for its step, and the newest generation is whole."""
    state = new_filesystem("xfs", _SIZE["xfs"]) / "state"
    own = {"pins": 2, "clone_pins": True}
    with AdamW(make_parameters(), state, **VALUES, **OPTIONS, **own) as optimizer:
        _train(optimizer, range(5))
    for name, wanted in (("pin-2.state", 2), ("pin-4.parameters", 4)):
        with (state / name).open("r+b") as file:
            file.seek(5000)
            flipped = bytes([file.read(1)[0] ^ 1])
            file.seek(5000)
            file.write(flipped)
        with pytest.raises(DataMismatchError, match="differs from its checksum"):
            AdamW.resume(make_parameters(1), state, step=wanted, verify=True)
    with AdamW.resume(make_parameters(1), state, verify=True) as optimizer:
        assert_equal(snapshot(optimizer), stock_snapshots(5)[-1])


_CLONES = "iobench.offload.clones.PinClones"
_POINTS = [
    *(f"iobench.linux.clone_range:{when}" for when in ("after:2", "before:14", "after:28")),
    *(f"{_CLONES}.make:{when}" for when in ("before:1", "after:1", "after:2")),
    f"{_CLONES}.remove_others:before:3",
    "iobench.offload.files.StateFile.write:before:3",
]
_RANDOM = 6


def test_killed(new_filesystem: Callable[..., Path]) -> None:
    """At each step of a pin and at random calls: what was durable is there, and a clone without a
    record is removed."""
    root = new_filesystem("xfs", _SIZE["xfs"])
    seed = random.randrange(2**32)
    moments = random.Random(seed)
    with OffloadKills.open() as kills:
        calls = sorted(kills.calls)
        drawn = [(name, moments.randint(1, kills.calls[name])) for name in moments.sample(calls, 3)]
        points = [*_POINTS, *(f"{name}:before:{call}" for name, call in drawn)]
        for number, point in enumerate(points):
            directory = root / str(number)
            try:
                code, reported = kills.run(directory, point, "clones")
                assert code == -signal.SIGKILL or (point not in _POINTS and code == 0)
                kills.check(directory, reported)
                assert kills.run(directory, "clones")[0] == 0
                assert kills.check(directory, {}) == STEPS
                pinned = [one for one in inspect(directory).generations if one.step is not None]
                assert _clones(directory) == sorted(str(one.generation) for one in pinned)
                if point in _POINTS:  # at others, the last pin may be what the kill prevented
                    assert [one.step for one in pinned] == [STEPS]
            except BaseException as error:
                error.add_note(f"{point}, seed {seed}")
                raise


def test_a_full_disk(new_filesystem: Callable[..., Path]) -> None:
    """A pin takes space when its slots are written again: then a step raises ENOSPC, and training
    goes on when there is space."""
    root = new_filesystem("xfs", _SIZE["xfs"])
    optimizer = AdamW(make_parameters(), root / "state", clone_pins=True, **VALUES, **OPTIONS)
    _train(optimizer, range(2))
    with (root / "ballast").open("wb") as ballast:
        at, size = 0, 64 * MIB
        while size >= 4096:
            try:
                linux.fallocate(ballast.fileno(), at, size)
                at += size
            except OSError:  # ENOSPC
                size //= 2
        os.fsync(ballast.fileno())
    with pytest.raises(TransferError) as caught:
        _train(optimizer, range(2, 9), pin_every=100)
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(TransferError, match="continue with resume"):
        optimizer.close()
    (root / "ballast").unlink()
    with AdamW.resume(make_parameters(1), root / "state", step="pinned", verify=True) as pinned:
        assert_equal(snapshot(pinned), stock_snapshots(2)[-1])
    with AdamW.resume(make_parameters(1), root / "state", verify=True, memory="1MiB") as again:
        done = again.updates
        assert done >= 2
        _train(again, range(done, done + 2))
        assert_equal(snapshot(again), stock_snapshots(done + 2)[-1])


def test_without_reflinks(new_filesystem: Callable[..., Path]) -> None:
    """Slots are reserved instead, with a warning, and the directory is as without the option."""
    root = new_filesystem("ext4", 32 * MIB)
    with pytest.warns(RuntimeWarning, match=r"no reflinks\): slots are reserved for 1 pin"):
        AdamW(make_parameters(), root / "one", clone_pins=True, **VALUES, **OPTIONS).close()
    with warnings.catch_warnings(action="error"):
        AdamW(make_parameters(), root / "other", **VALUES, **OPTIONS).close()
    text, other = ((root / name / "layout.json").read_text() for name in ("one", "other"))
    assert text == other
    assert '"version": 1' in text


@pytest.mark.filterwarnings("ignore:step .. the optimizer is read:RuntimeWarning")
def test_a_clone_is_copied_to_a_remote_tier(
    new_filesystem: Callable[..., Path], tmp_path: Path
) -> None:
    """The copy of a checkpoint has the bytes of its clone, although later steps wrote its slots."""
    local, runs = new_filesystem("xfs", _SIZE["xfs"]), tmp_path / "runs"
    expected = stock_snapshots(4)
    remote = iobench.Remote(tmp_path / "remote", bandwidth_limit="1MiB")
    own: Any = {**VALUES, **OPTIONS, "pins": 3, "clone_pins": True}
    with (
        AdamW(make_parameters(), local / "state", **own) as optimizer,
        iobench.Checkpointer(
            runs, keep=iobench.KeepLast(2), offload=optimizer, tiers=[remote]
        ) as ckpt,
    ):
        for step in range(4):
            give_gradients(optimizer.param_groups[0]["params"], step)
            optimizer.step()
            if step == 1:
                ckpt.save_async({"step": 2}, 2)
        ckpt.wait(until="remote")
        assert _clones(local / "state")
    shutil.rmtree(runs)
    parameters = make_parameters(9)
    with (
        AdamW(parameters, tmp_path / "state", **{**own, "clone_pins": False}) as optimizer,
        iobench.Checkpointer(
            runs, keep=iobench.KeepLast(2), offload=optimizer, tiers=[remote]
        ) as ckpt,
    ):
        assert ckpt.load() == {"step": 2}
        assert_equal(snapshot(optimizer), expected[1])
