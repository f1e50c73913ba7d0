"""Checkpointer: saves, restores, retention and refusals; the test controls background saves."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from support.forked import in_child
from support.liars import AdmitsIt

import iobench
from iobench import Checkpointer, KeepEvery, KeepLast, Memory, load_checkpoint
from iobench.checkpoint.checksums import PieceDigests
from iobench.checkpoint.ledger import Ledger
from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.retention import by_age
from iobench.checkpoint.save import Save
from iobench.checkpoint.slots import Slot
from iobench.checkpoint.store import STAGING_SUFFIX, DirectoryStore
from iobench.errors import (
    DataMismatchError,
    OptionError,
    StateError,
    TargetError,
    TransferError,
    UsageError,
)
from iobench.regular_file import read_regular
from iobench.writers.buffered import BufferedWriter
from iobench.writers.local.new_file import PART_SUFFIX
from iobench.writers.transfer import Transfer

Make = Callable[..., Checkpointer]


@pytest.fixture
def make(runs: Path) -> Iterator[Make]:
    """Make Checkpointers on one directory; all are closed at the end, also after an error."""
    made: list[Checkpointer] = []

    def build(**options: Any) -> Checkpointer:
        made.append(Checkpointer(runs, **{"writer": "buffered", **options}))
        return made[-1]

    yield build
    for ckpt in made:
        try:
            ckpt.close()
        except (iobench.errors.IobenchError, OSError, RuntimeError):
            continue


def _state(value: float, size: int = 10) -> dict[str, Any]:
    return {"w": torch.full((size,), value), "step": value, "a": np.full(3, value)}


def _value(state: dict[str, Any]) -> float:
    """Return the one value that a state of `_state` consists of."""
    values = {*state["w"].tolist(), state["step"], *state["a"].tolist()}
    assert len(values) == 1, "a mixed state"
    return values.pop()


def _free_slots(ckpt: Checkpointer) -> list[Slot]:
    """Return the slots that no save has; no slot is free twice."""
    free = list(ckpt._persister.pool._free)
    assert len(free) == len(set(free))
    return free


def _statuses(ckpt: Checkpointer) -> list[tuple[int, str]]:
    return [(save.step, save.status) for save in ckpt.saves]


def _names(runs: Path) -> set[str]:
    return {path.name for path in runs.iterdir()} - {".iobench-lock"}


def test_save_and_load(make: Make, runs: Path, expect_same) -> None:
    """A save is complete on return; each step and the latest one can be loaded. The manifest has
    step, writer, format, files and a checksum of each tensor."""
    ckpt = make()
    for step in (5, 10, 20):
        save = ckpt.save(_state(step), step)
        assert save.status == "committed"
        assert save.transfer is not None
        assert save.transfer.durable
    assert (ckpt.steps(), ckpt.latest()) == ([5, 10, 20], 20)
    expect_same(_state(20), ckpt.load())
    assert ckpt.loaded is not None
    assert ckpt.loaded.step == 20
    expect_same(_state(5), ckpt.load(5))
    expect_same(_state(10), load_checkpoint(runs, 10))
    assert _names(runs) == {"step-5", "step-10", "step-20"}
    found = json.loads((runs / "step-5" / "manifest.json").read_text())
    assert (found["step"], found["world_size"], found["format"]) == (5, 1, "safetensors")
    assert found["writer"]["name"] == "buffered"
    files = {path.name: path.stat().st_size for path in (runs / "step-5").iterdir()}
    del files["manifest.json"]
    assert {file["path"]: file["size_bytes"] for file in found["files"]} == files
    (tensors,) = (file for file in found["files"] if file["path"] == "tensors.safetensors")
    assert [piece["name"] for piece in tensors["pieces"]] == ["", "a", "w"]


@pytest.mark.parametrize(
    ("options", "meanwhile", "at_the_end"),
    [
        ({"slots": 2, "on_full": "skip"}, "waiting skipped skipped", "committed skipped skipped"),
        ({"slots": 2, "on_full": "drop"}, "dropped dropped waiting", "dropped dropped committed"),
        ({"slots": 4}, "waiting waiting waiting", "dropped dropped committed"),
    ],
)
def test_saves_while_one_is_written(
    make: Make, gated, options: dict[str, Any], meanwhile: str, at_the_end: str
) -> None:
    """No save waits while a slot is free, and of those that wait the newest one is written; older
    ones are reported as dropped."""
    ckpt = make(writer=gated, **options)
    ckpt.save_async(_state(1), 1)
    gated.begun.acquire()
    for step in (2, 3, 4):
        ckpt.save_async(_state(step), step)
    assert [save.status for save in ckpt.saves] == ["writing", *meanwhile.split()]
    assert ckpt.steps() == []
    gated.let(2)
    ckpt.wait()
    assert [save.status for save in ckpt.saves] == ["committed", *at_the_end.split()]
    committed = [step for step, status in _statuses(ckpt) if status == "committed"]
    assert ckpt.steps() == committed
    assert _value(ckpt.load()) == committed[-1]


def test_one_slot_waits_for_storage(make: Make, gated) -> None:
    """slots=1: the next save begins after the commit of the one before."""
    ckpt = make(writer=gated, slots=1)
    ckpt.save_async(_state(1), 1)
    gated.let(2)
    ckpt.save_async(_state(2), 2)
    assert ckpt.saves[0].status == "committed"
    ckpt.wait()
    assert ckpt.steps() == [1, 2]


@pytest.mark.parametrize("call", ["save", "save_async", "wait", "close"])
def test_failures_are_raised_by_the_next_call(make: Make, gated, call: str) -> None:
    """A failure in the background is raised once, by any next call."""
    ckpt = make(writer=gated)
    gated.error = TransferError(errno.ENOSPC, "writing: No space left on device", "f")
    gated.let(10)
    ckpt.save_async(_state(1), 1)
    ckpt._persister.wait()
    arguments = (_state(2), 2) if call.startswith("save") else ()
    with pytest.raises(TransferError, match="No space left") as caught:
        getattr(ckpt, call)(*arguments)
    assert caught.value.errno == errno.ENOSPC
    assert "step 1" in caught.value.__notes__[0]
    assert _statuses(ckpt) == [(1, "failed")]
    if call != "close":
        ckpt.save_async(_state(1), 1)  # the same step, now that there is room
        ckpt.close()
        assert ckpt.steps() == [1]


def test_retention_after_the_commit(make: Make, gated, runs: Path) -> None:
    """Older checkpoints are removed only after the commit of a newer one, and not if its save
    fails."""
    ckpt = make(writer=gated, keep=KeepLast(1) | KeepEvery(steps=100))
    gated.let(3)
    for step in (1, 50, 60):
        ckpt.save(_state(step), step)
    assert ckpt.steps() == [1, 60]
    gated.error = TransferError(errno.EIO, "broken", "f")
    gated.let()
    with pytest.raises(TransferError):
        ckpt.save(_state(70), 70)
    assert ckpt.steps() == [1, 60]
    ckpt.save_async(_state(80), 80)
    assert ckpt.steps() == [1, 60]
    gated.let()
    ckpt.wait()
    assert ckpt.steps() == [1, 80]


def test_reopened(make: Make, runs: Path) -> None:
    """Another process continues: it finds the checkpoints, and removes incomplete ones."""
    first = make(keep=KeepLast(2))
    first.save(_state(1), 1)
    first.close()
    (runs / f".step-2.abcd{STAGING_SUFFIX}").mkdir()
    (runs / f".step-2.abcd{STAGING_SUFFIX}" / "tensors.safetensors").write_bytes(b"half")
    (runs / f".probe.1234{PART_SUFFIX}").touch()  # of a process killed while it tried the path
    (runs / "step-9").mkdir()  # no manifest: no checkpoint
    (runs / "notes.txt").write_text("mine")
    second = make(keep=KeepLast(2))
    assert second.latest() == 1
    for step in (2, 3):
        second.save(_state(step), step)
    assert second.steps() == [2, 3]
    assert _names(runs) == {"step-2", "step-3", "step-9", "notes.txt"}


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_a_step_saved_twice(make: Make, gated, how: str) -> None:
    """It is refused, also while the first is in flight; the first stays."""
    ckpt = make(writer=gated)
    ckpt.save_async(_state(1), 1)
    with pytest.raises(UsageError, match="step 1 is being saved"):
        ckpt.save_async(_state(9), 1)
    gated.let(5)
    ckpt.wait()
    with pytest.raises(UsageError, match=r"step 1 is saved already.*resume\(\).*remove\(1\) first"):
        getattr(ckpt, how)(_state(9), 1)
    assert _value(ckpt.load()) == 1
    ckpt.remove(1)
    getattr(ckpt, how)(_state(9), 1)
    assert _value(ckpt.load()) == 9
    with pytest.raises(UsageError, match="no checkpoint of step 5"):
        ckpt.remove(5)


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_a_step_whose_directory_was_removed(make: Make, runs: Path, how: str) -> None:
    """Someone has removed it by hand: it is saved again, because nothing is there."""
    ckpt = make()
    ckpt.save(_state(1), 1)
    shutil.rmtree(runs / "step-1")
    getattr(ckpt, how)(_state(9), 1)
    assert _value(ckpt.load()) == 9
    with pytest.raises(UsageError, match="step 1 is saved already"):
        ckpt.save(_state(1), 1)
    assert _value(ckpt.load()) == 9


def test_a_save_is_waited_for(make: Make, gated) -> None:
    """By its own methods, also from another thread; a failure is raised there and by `wait`."""
    ckpt = make(writer=gated, slots=3)
    first, second, third = (ckpt.save_async(_state(step), step) for step in (1, 2, 3))
    assert not first.wait(0)
    with pytest.raises(TimeoutError, match="the save of step 3 is waiting"):
        third.result(0.01)
    gated.let(99)
    assert first.result(30) is first
    assert second.wait(30)
    assert third.exception(30) is None
    assert [one.status for one in (first, second, third)] == [
        "committed",
        "dropped",
        "committed",
    ]
    gated.error = TransferError(errno.EIO, "no disk")
    failed = ckpt.save_async(_state(4), 4)
    with pytest.raises(TransferError, match="no disk"):
        failed.result(30)
    assert isinstance(failed.exception(), TransferError)
    with pytest.raises(TransferError, match="no disk"):
        ckpt.wait()


def test_resumed_from_an_older_one(make: Make) -> None:
    """After load(step) later checkpoints may be replaced, but no others."""
    ckpt = make()
    for step in (1, 2, 3):
        ckpt.save(_state(step), step)
    ckpt.load(1)
    ckpt.save(_state(20), 2)
    ckpt.save_async(_state(30), 3)
    assert _value(ckpt.load()) == 30
    assert _value(ckpt.load(2)) == 20
    with pytest.raises(UsageError, match="step 2 is saved already"):
        ckpt.save(_state(1), 2)


def test_what_was_replaced_cannot_be_removed(make: Make, runs: Path, monkeypatch) -> None:
    """A warning; the new checkpoint is committed."""
    ckpt = make()
    for step in (1, 2):
        ckpt.save(_state(step), step)
    ckpt.load(1)

    def fail(path: Path) -> None:
        raise TransferError(errno.EACCES, "removing: Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("iobench.checkpoint.store.remove_entry", fail)
        with pytest.warns(RuntimeWarning, match="cannot be removed .* Permission denied"):
            ckpt.save(_state(20), 2)
    assert _statuses(ckpt)[-1] == (2, "committed")
    assert (_value(ckpt.load()), ckpt.latest()) == (20, 2)
    ckpt.close()
    make()
    assert _names(runs) == {"step-1", "step-2"}


@pytest.mark.parametrize("renames", [1, 2, 3])
def test_killed_while_it_replaces(make: Make, runs: Path, monkeypatch, renames: int) -> None:
    """If names cannot be exchanged atomically, the leftovers of a kill are repaired."""
    ckpt = make()
    for step in (1, 2):
        ckpt.save(_state(step), step)
    ckpt.load(1)
    done: list[str] = []

    def rename(path: Path, target: Path) -> Path:
        if len(done) == renames:
            raise SystemExit  # from here on nothing happens any more
        os.rename(path, target)
        done.append(path.name)
        return target

    monkeypatch.setattr("iobench.linux.exchange_names", _cannot_exchange)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        patch.setattr("iobench.checkpoint.store.remove_entry", lambda _: None)
        patch.setattr("iobench.checkpoint.store.sync_directory", lambda _: None)
        with contextlib.suppress(SystemExit):
            ckpt.save(_state(20), 2)
    assert len(done) == renames
    ckpt.close()
    synced: list[Path] = []
    with monkeypatch.context() as patch:
        patch.setattr("iobench.checkpoint.store.sync_directory", synced.append)
        ckpt = make()
    assert synced == ([runs] if renames == 1 else [])  # a name that is put back is durable
    assert ckpt.steps() == [1, 2]
    assert _value(ckpt.load(2)) == (2 if renames == 1 else 20)
    assert _names(runs) == {"step-1", "step-2"}


def _cannot_exchange(one: str, other: str) -> None:
    raise OSError(errno.EINVAL, "Invalid argument")


def test_restart_after_going_back(make: Make, runs: Path) -> None:
    """The last saved checkpoint is the latest, also after a restart; a damaged one falls back to
    its own run, and the abandoned later steps are removed first."""
    ckpt = make()
    for step in (100, 200, 300):
        ckpt.save(_state(step), step)
    ckpt.load(200)
    for step in (210, 220):
        ckpt.save(_state(step), step)
    assert (ckpt.steps(), ckpt.latest()) == ([100, 200, 210, 220, 300], 220)
    ckpt.close()
    ckpt = make(keep=KeepLast(5))
    assert ckpt.latest() == 220
    assert _value(ckpt.load()) == _value(load_checkpoint(runs)) == 220
    _flip(runs / "step-220" / "state.json", 3)
    with pytest.warns(RuntimeWarning, match="step 220 is skipped"):
        assert _value(ckpt.load(on_corrupt="previous")) == 210
    ckpt.save(_state(230), 230)
    assert ckpt.steps() == [100, 200, 210, 220, 230]


def test_latest_reads_no_manifest_twice(
    make: Make, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a hundred checkpoints that would be a hundred requests to a bucket. After close another
    Checkpointer may have replaced a known checkpoint: all manifests are read."""
    first = make()
    for step in (100, 200, 300):
        first.save(_state(step), step)
    first.close()
    ckpt = make()
    ckpt.load(200)
    for step in (210, 300):
        ckpt.save(_state(step), step)
    read = _count_manifests(monkeypatch)
    assert ckpt.latest() == 300
    assert read == []
    shutil.rmtree(runs / "step-300")  # by somebody else
    assert ckpt.latest() == 210
    assert read == []
    shutil.copytree(runs / "step-100", runs / "step-400")
    _with_serial(runs / "step-400" / "manifest.json", 9)
    assert ckpt.latest() == 400
    assert read == [400]
    ckpt.close()
    other = make()
    other.load(100)
    other.save(_state(20), 200)
    assert ckpt.latest() == 200
    read.clear()
    assert other.latest() == 200
    assert read == []


def test_each_manifest_is_read_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening reads all, without their files; a load of the latest reads only its own."""
    first = make()
    for step in (1, 2, 3, 4):
        first.save(_state(step), step)
    first.close()
    read, parsed = _count_manifests(monkeypatch), []
    parse = Manifest.parse

    def counted(text: bytes, where: str, *, files: bool = True) -> Manifest:
        found = parse(text, where, files=files)
        parsed.append(len(found.files))
        return found

    monkeypatch.setattr(Manifest, "parse", counted)
    ckpt = make()
    assert (sorted(read), parsed) == ([1, 2, 3, 4], [0] * 4)
    read.clear()
    parsed.clear()
    assert _value(ckpt.load()) == 4
    assert (read, parsed) == ([4], [2])


def test_a_server_is_asked_for_several_manifests_at_once(make: Make, runs: Path) -> None:
    """A bucket of a thousand checkpoints would be a thousand answers to wait for."""
    ckpt, together = make(), threading.Barrier(3, timeout=60)
    for step in (1, 2, 3):
        ckpt.save(_state(step), step)

    class Slow(DirectoryStore):
        readers = 3

        def manifest(self, step: int, *, files: bool = True) -> Manifest:
            together.wait()
            return super().manifest(step, files=files)

    assert by_age(Slow(runs)) == [1, 2, 3]


def test_latest_while_its_step_is_replaced(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is the latest from the moment when it is visible."""
    ckpt = make()
    for step in (100, 200, 300):
        ckpt.save(_state(step), step)
    ckpt.load(100)
    ckpt.save(_state(20), 200)
    committed, seen = Ledger.committed, []

    def looked_at(ledger: Ledger, save: Save, serial: int) -> None:
        seen.append(ckpt.latest())
        committed(ledger, save, serial)

    monkeypatch.setattr(Ledger, "committed", looked_at)
    ckpt.save(_state(30), 300)
    assert seen == [300]


def _count_manifests(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the steps whose manifests are read from now on."""
    manifest, read = DirectoryStore.manifest, []

    def counted(store: DirectoryStore, step: int, **options: Any) -> Manifest:
        read.append(step)
        return manifest(store, step, **options)

    monkeypatch.setattr(DirectoryStore, "manifest", counted)
    return read


def test_checkpoints_without_a_serial(make: Make, runs: Path) -> None:
    """Those of older versions are in the order of their steps, before all with a serial."""
    ckpt = make()
    for step in (1, 3, 2):
        ckpt.save(_state(step), step)
    assert ckpt.latest() == 2
    ckpt.close()
    for step in (1, 2, 3):
        _without_serial(runs / f"step-{step}" / "manifest.json")
    ckpt = make()
    assert ckpt.latest() == 3
    ckpt.load(1)
    ckpt.save(_state(20), 2)
    assert ckpt.latest() == 2
    assert _value(ckpt.load()) == 20


def _without_serial(manifest: Path) -> None:
    """Turn it into a checkpoint of a version without serial numbers."""
    document = json.loads(manifest.read_text())
    del document["serial"]
    _sign(manifest, document)


def _with_serial(manifest: Path, serial: int) -> None:
    """Give it the serial of a later save."""
    _sign(manifest, {**json.loads(manifest.read_text()), "serial": serial})


def _sign(manifest: Path, document: dict[str, Any]) -> None:
    """Write the manifest with the checksum of its current content."""
    del document["xxh3_64"]
    text = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    document["xxh3_64"] = xxhash.xxh3_64_hexdigest(text)
    manifest.write_text(json.dumps(document))


def _meanwhile(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object], *, after: bool) -> None:
    """Call `act` when `load_checkpoint` reads the next manifest, before or after the read."""
    manifest = DirectoryStore.manifest
    waiting = [act]

    def read(store: DirectoryStore, step: int, **options: Any) -> Any:
        if waiting and not after:
            waiting.pop()()
        found = manifest(store, step, **options)
        if waiting:
            waiting.pop()()
        return found

    monkeypatch.setattr(DirectoryStore, "manifest", read)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("on_corrupt", ["raise", "previous"])
def test_removed_while_it_is_read(
    make: Make, runs: Path, monkeypatch, on_corrupt: str, after: bool
) -> None:
    """A trainer that commits and removes at that moment leaves the newer one, without damage."""
    ckpt = make(keep=KeepLast(1))
    ckpt.save(_state(1), 1)
    _meanwhile(monkeypatch, lambda: ckpt.save(_state(2), 2), after=after)
    assert _value(load_checkpoint(runs, on_corrupt=on_corrupt)) == 2
    _meanwhile(monkeypatch, lambda: ckpt.save(_state(3), 3), after=after)
    with pytest.raises(TargetError, match="step 2 was removed during the read"):
        load_checkpoint(runs, 2, on_corrupt=on_corrupt)


def test_replaced_while_it_is_read(make: Make, runs: Path, monkeypatch) -> None:
    """The new one is read."""
    ckpt = make()
    for step in (1, 2):
        ckpt.save(_state(step), step)
    ckpt.load(1)
    _meanwhile(monkeypatch, lambda: ckpt.save(_state(20), 2), after=True)
    assert _value(load_checkpoint(runs, 2)) == 20


def test_removed_faster_than_it_is_read(make: Make, runs: Path, monkeypatch) -> None:
    """The reader fails in the end, with a remedy."""
    ckpt = make(keep=KeepLast(1))
    ckpt.save(_state(0), 0)
    manifest, steps = DirectoryStore.manifest, iter(range(1, 1000))

    def read(store: DirectoryStore, step: int, **options: Any) -> Any:
        found = manifest(store, step, **options)
        if store is not ckpt._store:
            ckpt.save(_state(1), next(steps))
        return found

    monkeypatch.setattr(DirectoryStore, "manifest", read)
    with pytest.raises(TargetError, match="removed faster than they are read"):
        load_checkpoint(runs)


def test_budget(make: Make) -> None:
    """A state that does not fit is refused before memory is taken or bytes are copied. Without a
    budget the available memory is the limit."""
    ckpt = make(budget="64KiB", slots=2, on_full="raise")
    with pytest.raises(StateError, match=r"2 slots need 160.00 KiB.*the budget is 64.00 KiB"):
        ckpt.save_async(_state(1, size=10_000), 1)
    assert ckpt._persister.pool.size_bytes == 0
    assert _statuses(ckpt) == [(1, "failed")]
    ckpt.save(_state(1, size=10_000), 1)
    ckpt.save_async(_state(2), 2)
    assert 0 < ckpt._persister.pool.size_bytes <= 64 << 10
    ckpt.wait()
    assert ckpt.steps() == [1, 2]
    ckpt.close()
    with pytest.raises(StateError, match="are available"):
        make().save_async({"w": torch.empty(1).expand(1 << 50)}, 3)


def test_state_that_grows(make: Make) -> None:
    """Slots grow with the state, for example when an optimizer creates its state."""
    ckpt = make(slots=2)
    for step, size in enumerate([10, 50_000, 10, 200_000]):
        ckpt.save_async(_state(step, size), step)
    ckpt.wait()
    sizes = [len(ckpt.load(save.step)["w"]) for save in ckpt.saves if save.status == "committed"]
    assert sizes[-1] == 200_000
    assert len({len(slot.memory) for slot in _free_slots(ckpt)} - {0}) <= 2


def test_of_another_model(make: Make) -> None:
    """Missing, unexpected and mis-shaped names are listed before any tensor is read."""
    ckpt = make()
    ckpt.save({"model": {"a": torch.zeros(2), "b": torch.zeros(2, 3)}, "step": 5}, 5)
    other = {"model": {"b": torch.zeros(3, 2), "c": torch.zeros(1)}}
    with pytest.raises(iobench.errors.StateMismatchError) as caught:
        ckpt.load(like=other)
    assert caught.value.missing == ("model.c",)
    assert caught.value.unexpected == ("model.a",)
    assert caught.value.misshaped == {"model.b": ("float32 [3, 2]", "float32 [2, 3]")}
    assert "step 5 is of another model: missing 1 (model.c)" in str(caught.value)
    same = {"model": {"a": torch.zeros(2), "b": torch.zeros(2, 3)}}
    assert ckpt.load(like=same)["step"] == 5
    for b, described in (
        (torch.zeros(3, 2), "float32 [3, 2]"),
        (torch.zeros(2, 3, dtype=torch.int32), "int32 [2, 3]"),
    ):
        with pytest.raises(iobench.errors.StateMismatchError) as caught:
            ckpt.load(like={"model": {"a": torch.zeros(2), "b": b}})
        assert caught.value.misshaped == {"model.b": (described, "float32 [2, 3]")}
    with pytest.raises(iobench.errors.StateMismatchError, match=r"missing 1 \(extra.c"):
        ckpt.load(like={**same, "extra": {"c": torch.zeros(1)}})


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


_DAMAGES = {
    "a tensor": lambda at: _flip(at / "tensors.safetensors", -1),
    "its header": lambda at: _flip(at / "tensors.safetensors", 20),
    "its length": lambda at: _flip(at / "tensors.safetensors", 0),
    "state.json": lambda at: _flip(at / "state.json", 5),
    "the manifest": lambda at: _flip(at / "manifest.json", 50),
    "cut": lambda at: os.truncate(at / "tensors.safetensors", 100),
    "cut to nothing": lambda at: os.truncate(at / "state.json", 0),
    "cut manifest": lambda at: os.truncate(at / "manifest.json", 100),
    "gone": lambda at: (at / "tensors.safetensors").unlink(),
    "longer": lambda at: os.truncate(at / "tensors.safetensors", 100_000),
}


@pytest.mark.parametrize("damage", _DAMAGES)
def test_damaged(make: Make, runs: Path, damage: str) -> None:
    """Damage is found; the error names the previous checkpoint, which is used on request."""
    ckpt = make()
    for step in (1, 2):
        ckpt.save(_state(step), step)
    _DAMAGES[damage](runs / "step-2")
    with pytest.raises(DataMismatchError) as caught:
        ckpt.load()
    assert "the checkpoint before it is step 1" in caught.value.__notes__[0]
    with pytest.raises(DataMismatchError):
        load_checkpoint(runs)
    with pytest.warns(RuntimeWarning, match="step 2 is skipped"):
        state = ckpt.load("latest", on_corrupt="previous")
    assert _value(state) == 1
    assert ckpt.loaded is not None
    assert ckpt.loaded.step == 1
    assert list(ckpt.loaded.passed_over) == [2]
    ckpt.save(_state(22), 2)  # training comes by there again
    assert _value(ckpt.load()) == 22


def test_damaged_manifest_and_retention(make: Make, runs: Path) -> None:
    """Retention keeps a checkpoint of unknown age; saving its step is refused."""
    first = make()
    first.save(_state(1), 1)
    first.close()
    _flip(runs / "step-1" / "manifest.json", 50)
    ckpt = make(keep=KeepLast(1))
    with pytest.raises(UsageError, match="step 1 is saved already"):
        ckpt.save(_state(1), 1)
    ckpt.save(_state(2), 2)
    ckpt.save(_state(3), 3)
    assert ckpt.steps() == [1, 3]


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_unreadable_manifest(make: Make, runs: Path, monkeypatch, number: int) -> None:
    """A bad block of the disk damages one checkpoint; a transient error is raised at once."""
    first = make()
    for step in (1, 2):
        first.save(_state(step), step)
    first.close()

    def read(path: Path) -> bytes:
        if path.parent.name == "step-2":
            raise OSError(number, os.strerror(number), str(path))
        return read_regular(path)

    monkeypatch.setattr("iobench.checkpoint.store.read_regular", read)
    if number == errno.EACCES:
        with pytest.raises(TransferError, match="Permission denied"):
            make()
        return
    ckpt = make(keep=KeepLast(1))
    assert ckpt.latest() == 2
    with pytest.raises(DataMismatchError, match="Input/output error"):
        ckpt.load()
    for load in (ckpt.load, lambda **options: load_checkpoint(runs, **options)):
        with pytest.warns(RuntimeWarning, match="step 2 is skipped"):
            assert _value(load(on_corrupt="previous")) == 1


def test_nothing_to_load(make: Make) -> None:
    """An empty directory, a missing step, and no sound checkpoint. A missing directory is an error
    of its own: an empty one has no checkpoint, and a job begins anew."""
    ckpt = make()
    with pytest.raises(TargetError, match="missing: no such directory"):
        load_checkpoint(ckpt._store.directory / "missing")
    assert ckpt.latest() is None
    with pytest.raises(TargetError, match="holds no complete checkpoint"):
        ckpt.load()
    ckpt.save(_state(1), 1)
    with pytest.raises(TargetError, match=r"no checkpoint of step 7; it holds \[1\]"):
        ckpt.load(7)
    with pytest.raises(OptionError, match="on_corrupt"):
        ckpt.load(on_corrupt="ignore")
    _flip(ckpt._store.directory / "step-1" / "state.json", 3)
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(DataMismatchError, match="every checkpoint is damaged"),
    ):
        ckpt.load(on_corrupt="previous")


@pytest.mark.parametrize(
    ("state_of", "path"),
    [
        (lambda whole: {"w": whole}, "w (1 tensors in all)"),
        (lambda whole: {"a": whole[:24], "w": whole[16:]}, "a (2 tensors in all)"),
        (lambda whole: {"flat": whole.data, "w": whole[:24]}, "w (1 tensors in all)"),
    ],
    ids=["alone", "overlapping", "beside its data"],  # .data has a counter of its own
)
def test_lazy_changed_too_early(make: Make, monkeypatch, state_of, path: str) -> None:
    """A tensor that changes during its copy fails the save; no part of it is visible."""
    ckpt = make(lazy=True)
    state = state_of(torch.ones(40))
    copy_into = iobench.checkpoint.snapshot.copy_into

    def slow(*arguments: Any) -> None:
        copy_into(*arguments)
        state["w"].add_(1)

    monkeypatch.setattr(iobench.checkpoint.snapshot, "copy_into", slow)
    save = ckpt.save_async(state, 1)
    with pytest.raises(StateError, match=re.escape(f"{path} was changed")):
        ckpt.before_optimizer_step()
    assert save.status == "failed"
    assert ckpt.steps() == []


@pytest.fixture
def go(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """What must be set before a state is copied."""
    go, copy_into = threading.Event(), iobench.checkpoint.snapshot.copy_into

    def held_back(*arguments: Any) -> float:
        assert go.wait(60)
        return copy_into(*arguments)

    monkeypatch.setattr(iobench.checkpoint.snapshot, "copy_into", held_back)
    return go


def test_lazy_other_memory(make: Make, go: threading.Event) -> None:
    """Tensors that get other memory before their copy (`.data =`) are saved as they were."""
    ckpt = make(lazy=True)
    for step in range(2):  # the second one reuses the structure of the first
        go.clear()
        state = {"w": torch.full((10,), float(step)), "turned": torch.full((4, 6), step + 0.5).t()}
        ckpt.save_async(state, step)
        for tensor in state.values():
            tensor.data = torch.zeros(3)
        go.set()
        ckpt.before_optimizer_step()
        found = ckpt.load()
        assert found["w"].tolist() == [step] * 10
        assert found["turned"].tolist() == [[step + 0.5] * 4] * 6


def test_closed(make: Make) -> None:
    """A closed one saves no more, frees memory and directory, and may be closed twice."""
    ckpt = make()
    ckpt.save_async(_state(1), 1)
    ckpt.close()
    assert ckpt.saves[0].status == "committed"
    assert ckpt._persister.pool.size_bytes == 0
    ckpt.close()
    for use in (lambda: ckpt.save(_state(2), 2), lambda: ckpt.wait(), lambda: ckpt.load()):
        with pytest.raises(UsageError, match="closed"):
            use()


def test_left_by_an_error(make: Make, gated) -> None:
    """The trainer's own error propagates, with the background failure as its note."""
    gated.error = TransferError(errno.EIO, "broken", "f")
    gated.let()
    with pytest.raises(ZeroDivisionError) as caught, make(writer=gated) as ckpt:
        raise ZeroDivisionError(ckpt.save_async(_state(1), 1))
    assert "broken" in caught.value.__notes__[0]


@contextlib.contextmanager
def _expect_finished(runs: Path) -> Iterator[None]:
    """A Checkpointer is forgotten in the block: there is one warning, and its save is committed."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
        for name in ("iobench-snapshot", "iobench-persister"):
            for thread in threading.enumerate():
                if thread.name == name:
                    thread.join()
    assert ["never closed" in str(one.message) for one in caught] == [True]
    with Checkpointer(runs, writer="buffered") as again:
        assert _value(again.load()) == 1


class _Forgetting(BufferedWriter):
    """Drops the last reference to a Checkpointer in a thread that writes for it."""

    held: list[Checkpointer]

    def write_many(self, images: Any, target: Any, **options: Any) -> Transfer:
        helper = threading.Thread(target=self.held.clear)
        helper.start()
        helper.join()
        return super().write_many(images, target, **options)


def test_forgotten_while_it_writes(runs: Path) -> None:
    """Collected in a thread that the save waits for: it does not wait for the save itself."""
    writer = _Forgetting()
    writer.held = [Checkpointer(runs, writer=writer)]
    with _expect_finished(runs):
        persister = writer.held[0]._persister
        writer.held[0].save_async(_state(1), 1)
        persister.wait()


def test_forgotten_while_it_copies(runs: Path, go: threading.Event) -> None:
    """It keeps the directory until a lazy copy in progress is a checkpoint."""
    with _expect_finished(runs):
        made = [Checkpointer(runs, writer="buffered", lazy=True)]
        made[0].save_async(_state(1), 1)
        made.clear()
        try:
            with pytest.raises(TargetError, match="in use"):
                Checkpointer(runs, writer="buffered")
        finally:
            go.set()


def test_ctrl_c_while_the_copy_is_waited_for(make: Make, go: threading.Event, impatience) -> None:
    """After an interrupted wait for a lazy copy, the next wait continues to its end."""
    ckpt, state = make(lazy=True), _state(1)
    save = ckpt.save_async(state, 1)

    def wait_on() -> None:
        for _ in range(2):
            with contextlib.suppress(KeyboardInterrupt):
                ckpt.before_optimizer_step()
        ckpt.before_optimizer_step()
        state["w"].fill_(-1)
        raise KeyboardInterrupt  # as whoever was interrupted does at last

    with impatience(go):
        wait_on()
    ckpt.wait()
    assert save.status == "committed"
    assert _value(ckpt.load()) == 1


def test_ctrl_c_just_after_the_step_is_claimed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save has failed, and the step can be saved."""
    ckpt = make()

    def interrupted(**_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("iobench.checkpointer.saving.Snapshot", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ckpt.save_async(_state(1), 1)
    assert _statuses(ckpt) == [(1, "failed")]
    ckpt.save_async(_state(1), 1)
    assert _value(ckpt.load()) == 1


def test_ctrl_c_while_checksums_are_waited_for(
    make: Make, monkeypatch: pytest.MonkeyPatch, impatience
) -> None:
    """A save returns only after the checksum thread has released the tensors."""
    ckpt, go_on, ended = make(), threading.Event(), threading.Event()
    compute = PieceDigests.compute

    def slow(*arguments: Any, **values: Any) -> None:
        if threading.current_thread().name == "iobench-checksums":
            assert go_on.wait(60)
            ended.set()
        compute(*arguments, **values)

    monkeypatch.setattr(PieceDigests, "compute", slow)
    with impatience(go_on):
        ckpt.save(_state(1), 1)
    assert ended.is_set()
    assert ckpt.steps() == []


def test_priority_that_cannot_be_lowered(
    make: Make, monkeypatch: pytest.MonkeyPatch, runs: Path
) -> None:
    """The save continues. The warning, if warnings are errors, is raised to the trainer."""

    def refuse(nice: int) -> None:
        raise PermissionError(errno.EPERM, "no")

    monkeypatch.setattr("iobench.linux.yield_to_others", refuse)
    ckpt = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save = ckpt.save_async(_state(1), 1)
        with pytest.raises(RuntimeWarning, match="at the trainer's own priority"):
            ckpt.wait()
    assert save.status == "committed"
    ckpt.wait()
    assert _value(ckpt.load()) == 1


def test_in_a_forked_child(make: Make) -> None:
    """A child of a data loader can neither save nor close its parent's Checkpointer."""
    ckpt = make()

    def use() -> None:
        ckpt.close()
        with pytest.raises(UsageError, match="forked"):
            ckpt.save(_state(1), 1)

    in_child(use)
    ckpt.save(_state(1), 1)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"slots": 0}, "slots=0"),
        ({"slots": 2.0}, "slots=2.0"),
        ({"writer": 3}, 'writer=3: takes a value such as "hybrid"'),
        ({"keep": 3}, r"keep=3: takes a value such as KeepLast\(3\)"),
        ({"keep": KeepLast}, "keep=<class"),
        ({"schedule": 500}, r"schedule=500: takes a value such as Every\(500\)"),
        ({"budget": True}, 'budget=True: takes a value such as "16GiB"'),
        ({"bandwidth_limit": 0.5}, 'bandwidth_limit=0.5: takes a value such as "500MiB"'),
        ({"lazy": "no"}, "lazy='no'"),
        ({"on_full": "newest"}, "on_full='newest'"),
        ({"budget": "much"}, "not a size"),
        ({"bandwidth_limit": 0}, "bandwidth_limit=0"),
        ({"writer": "null"}, "stores nothing"),
        ({"writer": "s3"}, "needs a target s3"),
        ({"on_event": "print"}, "on_event='print'"),
        ({"slots": 2, "tiers": [Memory("1MiB")]}, "the sizes of the Memory tiers decide"),
        ({"budget": "1GiB", "tiers": [Memory("1MiB")]}, "the sizes of the Memory tiers decide"),
    ],
)
def test_nonsense(make: Make, options: dict[str, Any], match: str) -> None:
    """Invalid options are refused, and the directory stays free."""
    with pytest.raises(UsageError, match=match):
        make(**options)
    make().close()


@pytest.mark.parametrize(
    ("step", "named"),
    [(-1, "-1"), (1.0, "1.0"), ("7", "'7'"), (True, "True"), ({"w": 1}, "<class 'dict'>")],
)
def test_no_step(make: Make, step: Any, named: str) -> None:
    """A step is an int. A state in its place, as where the arguments were swapped, is not shown."""
    with pytest.raises(UsageError, match=f"save.state, step.: step is {named}; give an int"):
        make().save(_state(1), step)


def test_bandwidth_limit(make: Make, monkeypatch) -> None:
    """Background saves are limited to the rate; save() is not."""
    waited: list[float] = []
    monkeypatch.setattr(
        "iobench.checkpoint.rate_limit.RateLimit.wait",
        lambda limit, size: waited.append(size / limit.rate_bytes_per_s),
    )
    ckpt = make(bandwidth_limit="1MiB")
    state = {"w": torch.zeros(1 << 20, dtype=torch.uint8)}
    ckpt.save(state, 1)
    assert not waited
    ckpt.save_async(state, 2)
    ckpt.wait()
    assert sum(waited) == pytest.approx(1, rel=0.1)


def test_interrupted_while_it_closes(make: Make, gated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after the wait: it, or the next `close`, raises the failure."""
    ckpt = make(writer=gated)
    gated.error = TransferError(errno.ENOSPC, "writing: No space left on device", "f")
    gated.let()
    ckpt.save_async(_state(1), 1)
    ckpt._persister.wait()

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ckpt._persister.pool, "free", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            ckpt.close()
    assert isinstance(caught.value.__context__, TransferError)
    assert ckpt._unclosed.alive
    ckpt.close()
    assert not ckpt._unclosed.alive


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_is_not_durable(make: Make, runs: Path, background: bool) -> None:
    """A writer that reports `durable=False` fails the save; the older checkpoint stays."""
    with make(keep=KeepLast(1)) as ckpt:
        ckpt.save({"w": torch.zeros(4)}, step=1)

    def save(ckpt: Checkpointer) -> None:
        (ckpt.save_async if background else ckpt.save)({"w": torch.ones(4)}, step=2)
        ckpt.wait()

    with make(keep=KeepLast(1), writer=AdmitsIt()) as ckpt:
        with pytest.raises(TransferError, match="step 2: writer 'admits-it' did not make"):
            save(ckpt)
        assert ckpt.steps() == [1]
    assert torch.equal(load_checkpoint(runs)["w"], torch.zeros(4))
