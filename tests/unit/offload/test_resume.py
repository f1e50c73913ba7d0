"""Every step is a checkpoint: pins, resume, damage, and directories that must be refused."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

from iobench.errors import (
    DataMismatchError,
    StateError,
    StateMismatchError,
    TargetError,
    TransferError,
    UsageError,
)
from iobench.offload import AdamW
from iobench.offload.files import read_layout
from iobench.offload.layout import GenerationRecord, area_bytes
from iobench.offload.store import GenerationStore
from iobench.units import MIB

_STEPS = 8


@pytest.fixture(scope="module")
def expected() -> list[list[dict[str, torch.Tensor]]]:
    """The snapshots of the stock training after each step."""
    torch.set_num_threads(1)
    return stock_snapshots(_STEPS)


def _train(optimizer: AdamW, until: int, pins: tuple[int, ...] = ()) -> None:
    parameters = optimizer.param_groups[0]["params"]
    for step in range(optimizer.updates, until):
        give_gradients(parameters, step)
        optimizer.step()
        if step + 1 in pins:
            optimizer.pin(step + 1, {"seen": step + 1, "rng": torch.get_rng_state()})


def _trained(directory: Path, until: int, pins: tuple[int, ...] = (), keep: int = 2) -> None:
    with AdamW(make_parameters(), directory, **VALUES, **OPTIONS, pins=keep) as optimizer:
        _train(optimizer, until, pins)


def _flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 16]))


def _place(directory: Path, step: int, chunk: int) -> tuple[int, int]:
    """Offsets of a chunk in both files, in the generation with `step` updates."""
    store = GenerationStore.open(directory)
    try:
        record = next(one for one in store.records() if one.updates == step)
        slot = int(record.rows[chunk]["slot"])
        layout = store.layout
        return layout.offset("state", chunk, slot), layout.offset("parameters", chunk, slot)
    finally:
        store.close()


def test_resume_is_exact(tmp_path: Path, expected: list) -> None:
    """Closed and resumed after every step, the bits are those of one run without a pause."""
    _trained(tmp_path, 1)
    for step in range(1, _STEPS):
        parameters = make_parameters(step)
        with AdamW.resume(parameters, tmp_path) as optimizer:
            assert optimizer.updates == optimizer.restored.updates == step
            for parameter, one in zip(parameters, expected[step - 1], strict=True):
                assert torch.equal(parameter, one["model"])
            _train(optimizer, step + 1)
            assert_equal(snapshot(optimizer), expected[step])


def test_pins(tmp_path: Path, expected: list) -> None:
    """Each pin gives its state and what was added; the oldest gives way; a branch begins at one."""
    _trained(tmp_path, 6, pins=(1, 3, 4))
    for step, pinned in ((3, 3), (4, 4), ("pinned", 4), ("latest", None)):
        with AdamW.resume(make_parameters(1), tmp_path, step=step) as optimizer:
            assert optimizer.pinned() == [3, 4]
            assert optimizer.restored.step == pinned
            assert_equal(snapshot(optimizer), expected[(pinned or 6) - 1])
            if pinned:
                assert optimizer.restored.extra["seen"] == pinned
                assert torch.equal(optimizer.restored.extra["rng"], torch.get_rng_state())
    with pytest.raises(UsageError, match="step 1 is not pinned; pinned: 3, 4; the newest has 6"):
        AdamW.resume(make_parameters(), tmp_path, step=1)
    with pytest.raises(UsageError, match="step='newest'"):
        AdamW.resume(make_parameters(), tmp_path, step="newest")
    with AdamW.resume(make_parameters(), tmp_path, step=3) as optimizer:
        optimizer.pin(30)  # before any step: the same generation under another number
        _train(optimizer, 5, pins=(5,))
        optimizer.wait(5)
        assert optimizer.pinned() == [30, 5]
        assert_equal(snapshot(optimizer), expected[4])
        with pytest.raises(UsageError, match="step 3 is not pinned"):
            optimizer.wait(3)
    with AdamW.resume(make_parameters(), tmp_path) as optimizer:
        assert optimizer.updates == 5
        assert_equal(snapshot(optimizer), expected[4])


def test_pins_survive_later_steps(tmp_path: Path, expected: list) -> None:
    """A pin every step: slots rotate, and each kept generation stays whole."""
    with AdamW(make_parameters(), tmp_path, **VALUES, **OPTIONS, pins=2) as optimizer:
        sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
        _train(optimizer, 7, pins=tuple(range(1, 8)))
        optimizer.wait(7)
        for name in ("state", "parameters", "records"):
            assert (tmp_path / name).stat().st_size == sizes[name]
    for step in (6, 7):
        with AdamW.resume(make_parameters(), tmp_path, step=step, verify=True) as optimizer:
            assert_equal(snapshot(optimizer), expected[step - 1])


def test_what_cannot_be_pinned(tmp_path: Path) -> None:
    """Before the first step there is no generation; `extra` must be loadable without pickle."""
    with AdamW(make_parameters(), tmp_path, **VALUES, **OPTIONS) as optimizer:
        with pytest.raises(UsageError, match="nothing to pin"):
            optimizer.pin(0)
        _train(optimizer, 1)
        with pytest.raises(StateError, match="extra cannot be loaded again"):
            optimizer.pin(1, {"lock": Path("x")})
        assert optimizer.pinned() == []


@pytest.mark.parametrize("verify", [False, True])
def test_damaged_parameters(verify: bool, tmp_path: Path, expected: list) -> None:
    """A flipped bit in the newest parameters: the newest pin is taken, with a warning, for good."""
    _trained(tmp_path, 5, pins=(2, 4))
    _flip(tmp_path / "parameters", _place(tmp_path, 5, 1)[1] + 77)
    with pytest.warns(RuntimeWarning, match="generation 5 is damaged: .*chunk 1 differs"):
        optimizer = AdamW.resume(make_parameters(1), tmp_path, verify=verify)
    with optimizer:
        assert optimizer.restored.step == 4
        assert "chunk 1" in optimizer.restored.passed_over[0]
        assert_equal(snapshot(optimizer), expected[3])
        _train(optimizer, 6)
        assert_equal(snapshot(optimizer), expected[5])
    with AdamW.resume(make_parameters(1), tmp_path) as optimizer:
        assert optimizer.updates == 6


def test_damaged_state(tmp_path: Path, expected: list) -> None:
    """A flipped bit in a moment: the first step finds it and updates nothing of it; the next resume
    takes the pin. With `verify` the first resume does."""
    _trained(tmp_path, 5, pins=(4,))
    _flip(tmp_path / "state", _place(tmp_path, 5, 3)[0] + 4096 + 9000)
    optimizer = AdamW.resume(make_parameters(1), tmp_path)
    assert optimizer.updates == 5
    with pytest.raises(DataMismatchError, match="chunk 3 differs from its checksum"):
        _train(optimizer, 6)
    with pytest.raises(TransferError, match="continue with resume"):
        optimizer.close()
    with AdamW.resume(make_parameters(1), tmp_path) as optimizer:
        assert optimizer.restored.step == 4
        _train(optimizer, 5)
        assert_equal(snapshot(optimizer), expected[4])


def test_damage_without_pins_takes_the_step_before_if_it_is_whole(
    tmp_path: Path, expected: list
) -> None:
    """Nothing was written after the newest generation, so the one before is still there."""
    _trained(tmp_path, 5, keep=0)
    _flip(tmp_path / "state", _place(tmp_path, 5, 0)[0] + 4096)
    with pytest.warns(RuntimeWarning, match="generation 5 is damaged"):
        optimizer = AdamW.resume(make_parameters(1), tmp_path, verify=True)
    with optimizer:
        assert optimizer.updates == 4
        assert_equal(snapshot(optimizer), expected[3])


def test_damage_everywhere(tmp_path: Path) -> None:
    """Without a whole generation the error has each reason; a given step has no substitute."""
    _trained(tmp_path, 3, pins=(2,), keep=1)
    for step in (2, 3):
        _flip(tmp_path / "state", _place(tmp_path, step, 0)[0] + 8)  # the header
    with pytest.raises(DataMismatchError, match="generation 2 is damaged"):
        AdamW.resume(make_parameters(), tmp_path, step=2)
    with (
        pytest.warns(RuntimeWarning, match="generation 3"),
        pytest.raises(DataMismatchError, match="slot of chunk 0 is not what generation 3 wrote"),
    ):
        AdamW.resume(make_parameters(), tmp_path)


def test_a_torn_record_is_the_one_before(tmp_path: Path, expected: list) -> None:
    """Any flipped bit in the newest record: the generation before is the newest."""
    _trained(tmp_path, 4, keep=0)
    data = (tmp_path / "records").read_bytes()
    layout = read_layout(tmp_path)
    size = area_bytes(layout)
    found = {n: GenerationRecord.decode(data[n * size : (n + 1) * size], layout) for n in range(3)}
    newest = max((one.sequence, n) for n, one in found.items() if one is not None)[1]
    _flip(tmp_path / "records", newest * size + 100)
    with AdamW.resume(make_parameters(1), tmp_path) as optimizer:
        assert optimizer.updates == 3
        assert_equal(snapshot(optimizer), expected[2])


def test_another_model(tmp_path: Path) -> None:
    """Shapes and dtypes differ: nothing is read into it, and the state is untouched."""
    _trained(tmp_path, 2)
    parameters = make_parameters(1)
    before = [parameter.detach().clone() for parameter in parameters]
    parameters[2] = torch.nn.Parameter(torch.zeros(998))
    with pytest.raises(StateMismatchError, match=r"float32 \[998\] .* bfloat16 \[999\]"):
        AdamW.resume(parameters, tmp_path)
    assert torch.equal(parameters[0], before[0])
    with AdamW.resume(make_parameters(), tmp_path) as optimizer:
        assert optimizer.updates == 2


def test_two_trainers(tmp_path: Path) -> None:
    """The second one is refused by both ways, and the first goes on."""
    with AdamW(make_parameters(), tmp_path, **VALUES, **OPTIONS) as optimizer:
        _train(optimizer, 1)
        for again in (AdamW, AdamW.resume):
            with pytest.raises(
                TargetError, match=r"is in use: process \d+ .* Close that optimizer"
            ):
                again(make_parameters(), tmp_path)
        _train(optimizer, 2)
    with pytest.raises(TargetError, match="already holds the state of a training"):
        AdamW(make_parameters(), tmp_path)


def test_directories_without_a_state(tmp_path: Path) -> None:
    """None, an empty one, one whose construction or first step never ended, a newer version."""
    for name in ("missing", "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(TargetError, match="holds no offload state"):
            AdamW.resume(make_parameters(), tmp_path / name)
    begun = tmp_path / "begun"
    AdamW(make_parameters(), begun, **OPTIONS).close()
    with pytest.raises(UsageError, match="nothing to restore"):
        AdamW.resume(make_parameters(), begun)
    (begun / "layout.json").unlink()  # killed before: files without a layout
    with AdamW(make_parameters(), begun, **OPTIONS) as optimizer:
        _train(optimizer, 1)
    layout = begun / "layout.json"
    layout.write_text(layout.read_text().replace('"version": 1', '"version": 3'))
    for again in (AdamW, AdamW.resume):
        with pytest.raises(UsageError, match="format version 3; this iobench reads 1"):
            again(make_parameters(), begun)


def test_a_truncated_file(tmp_path: Path) -> None:
    """A file of another size is refused before anything is read."""
    _trained(tmp_path, 1)
    os.truncate(tmp_path / "state", 8192)
    with pytest.raises(DataMismatchError, match="state: has 8192 bytes, its layout asks for"):
        AdamW.resume(make_parameters(), tmp_path)


def test_no_threads_are_left(tmp_path: Path) -> None:
    """`close` ends them, and so does a failed resume."""
    _trained(tmp_path, 2)
    os.truncate(tmp_path / "records", 0)
    with pytest.raises(DataMismatchError):
        AdamW.resume(make_parameters(), tmp_path)
    assert not [t.name for t in threading.enumerate() if t.name.startswith("iobench-offload")]


@pytest.mark.root
def test_too_little_space(new_filesystem: Callable[..., Path]) -> None:
    """ENOSPC is an error of the construction, which leaves nothing; later steps need no space."""
    root = new_filesystem("ext4", 8 * MIB)
    large = [torch.nn.Parameter(torch.zeros(1_000_000))]
    with pytest.raises(TargetError, match=r"46\.\d+ MiB cannot be reserved for 3 generations"):
        AdamW(large, root / "a", memory="100MiB")
    assert {path.name for path in (root / "a").iterdir()} == {".iobench-lock"}
    with AdamW(make_parameters(), root / "b", **VALUES, **OPTIONS) as optimizer:
        with pytest.raises(OSError, match="No space left"):
            (root / "filler").write_bytes(bytes(16 * MIB))
        _train(optimizer, 4)
        optimizer.pin(4, {"rng": torch.zeros(3)})
        optimizer.wait(4)


@pytest.mark.root
def test_a_read_only_file_system(new_filesystem: Callable[..., Path]) -> None:
    """One clear error, and after a remount the state is there."""
    root = new_filesystem("ext4", 32 * MIB)
    _trained(root / "a", 2)
    subprocess.run(["mount", "-o", "remount,ro", root], check=True)
    with pytest.raises(TransferError, match="Read-only file system"):
        AdamW.resume(make_parameters(), root / "a")
    with pytest.raises(TargetError, match="Read-only file system"):
        AdamW(make_parameters(), root / "b")
    subprocess.run(["mount", "-o", "remount,rw", root], check=True)
    with AdamW.resume(make_parameters(), root / "a") as optimizer:
        assert optimizer.updates == 2


@pytest.mark.parametrize("wanted", ["pinned", 1])
def test_a_lost_extra(wanted: Any, tmp_path: Path) -> None:
    """The state is whole: it is taken, with a warning, and its pin stays."""
    with AdamW(make_parameters(), tmp_path, **VALUES, **OPTIONS) as optimizer:
        _train(optimizer, 1)
        optimizer.pin(1, extra={"rng": torch.zeros(3)})
        _train(optimizer, 2)
    size = area_bytes(read_layout(tmp_path))
    data = (tmp_path / "records").read_bytes()
    areas = [data[at : at + size] for at in range(0, len(data), size)]
    (own,) = (number for number, area in enumerate(areas) if b'"sequence": 2,' in area)
    _flip(tmp_path / "records", own * size + 100)
    for _ in range(2):
        with pytest.warns(
            RuntimeWarning, match=r"the pin of step 1 is damaged; its state is whole"
        ):
            again = AdamW.resume(make_parameters(3), tmp_path, step=wanted)
        with again:
            assert again.restored is not None
            assert (again.restored.step, again.restored.extra) == (1, None)
            assert again.pinned() == [1]
            assert_equal(snapshot(again), stock_snapshots(1)[0])


@pytest.mark.parametrize("damage", ["version", "torn"])
def test_records_that_cannot_be_read(damage: str, tmp_path: Path) -> None:
    """Of a newer version, or all damaged: no constructor replaces the state."""
    with AdamW(make_parameters(), tmp_path, **VALUES, **OPTIONS) as optimizer:
        _train(optimizer, 2)
    records = bytearray((tmp_path / "records").read_bytes())
    for found in re.finditer(rb"iobgener", bytes(records)):
        records[found.start() + (8 if damage == "version" else 100)] ^= 3
    (tmp_path / "records").write_bytes(records)
    before = (tmp_path / "state").read_bytes()
    message = "format version 2" if damage == "version" else "whose records are damaged"
    with pytest.raises((UsageError, TargetError), match=message):
        AdamW(make_parameters(), tmp_path, **OPTIONS)
    with pytest.raises(UsageError):
        AdamW.resume(make_parameters(), tmp_path)
    assert (tmp_path / "state").read_bytes() == before


def test_two_pins_of_one_generation(tmp_path: Path) -> None:
    """Both stay while there is room, each with the groups at its own time."""
    with AdamW(make_parameters(), tmp_path, **VALUES, **OPTIONS, pins=2) as optimizer:
        _train(optimizer, 1)
        optimizer.pin(1)
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.pin(2)
        _train(optimizer, 3)
        optimizer.wait()
        assert optimizer.pinned() == [1, 2]
    for step, lr in ((1, VALUES["lr"]), (2, 0.5)):
        with AdamW.resume(make_parameters(3), tmp_path, step=step, verify=True) as again:
            assert again.param_groups[0]["lr"] == lr
            assert_equal(snapshot(again), stock_snapshots(1)[0])


def test_a_failed_resume_leaves_the_groups_alone(tmp_path: Path) -> None:
    """torch fills in the dicts that it gets; a new training after the error has its own values."""
    groups = [{"params": make_parameters(), "weight_decay": 0.5}]
    with pytest.raises(TargetError):
        AdamW.resume(groups, tmp_path)
    with AdamW(groups, tmp_path, lr=1e-2, **OPTIONS) as optimizer:
        (group,) = optimizer.param_groups
        assert (group["lr"], group["weight_decay"]) == (1e-2, 0.5)
