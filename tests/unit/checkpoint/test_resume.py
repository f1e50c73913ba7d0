"""`resume`: one line begins a run and goes on with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from iobench import Checkpointer
from iobench.errors import DataMismatchError, StateMismatchError, UsageError


def _run(runs: Path, until: int) -> tuple[int, torch.nn.Linear, torch.optim.Optimizer]:
    """Train to step `until`, as a script that is started again; return where it began."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
    with Checkpointer(runs, writer="buffered") as ckpt:
        first = ckpt.resume({"model": model, "optimizer": optimizer})
        for step in range(first, until):
            model(data[step]).sum().backward()  # type: ignore[no-untyped-call]  # torch has no type
            optimizer.step()
            optimizer.zero_grad()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            ckpt.save_async(state, step)
    return first, model, optimizer


def test_a_script_that_is_run_again(tmp_path: Path) -> None:
    """Its weights have the bits of a run without a break; at the end there is nothing to do."""
    whole = _run(tmp_path / "whole", 6)
    assert _run(tmp_path / "parts", 3)[0] == 0
    first, model, optimizer = _run(tmp_path / "parts", 6)
    assert (whole[0], first) == (0, 3)
    assert torch.equal(model.weight, whole[1].weight)
    found, want = optimizer.state_dict()["state"], whole[2].state_dict()["state"]
    assert all(torch.equal(found[one]["exp_avg"], want[one]["exp_avg"]) for one in want)
    assert _run(tmp_path / "parts", 6)[0] == 6


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    """Nothing is changed: not by another shape, and not by a name that is missing."""
    with Checkpointer(tmp_path, writer="buffered") as ckpt:
        ckpt.save({"model": torch.nn.Linear(4, 4).state_dict()}, 1)
        model, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
        before = model.weight.clone()
        with pytest.raises(StateMismatchError, match="mis-shaped"):
            ckpt.resume({"model": other})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(StateMismatchError, match=r"missing.*optimizer"):
            ckpt.resume({"model": model, "optimizer": optimizer})
        assert torch.equal(model.weight, before)
        assert ckpt.resume({"model": model}) == 2


def test_a_damaged_checkpoint(tmp_path: Path) -> None:
    """`on_corrupt` is that of load."""
    model = torch.nn.Linear(4, 4)
    with Checkpointer(tmp_path, writer="buffered") as ckpt:
        for step in (1, 2):
            ckpt.save({"model": model.state_dict()}, step)
        file = next(one for one in (tmp_path / "step-2").iterdir() if one.suffix == ".safetensors")
        damaged = bytearray(file.read_bytes())
        damaged[-1] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(DataMismatchError):
            ckpt.resume({"model": model})
        with pytest.warns(RuntimeWarning, match="step 2 is skipped"):
            assert ckpt.resume({"model": model}, on_corrupt="previous") == 2


def _sharded() -> torch.optim.Optimizer:
    model = torch.nn.Linear(4, 4)
    model.weight.placements = ()  # type: ignore[attr-defined]  # what shows a DTensor
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"step": 5}, "'step' is a int, without load_state_dict"),
        (torch.nn.Linear(2, 2), r'such as \{"model": model\}, not a Linear'),
        ({"optimizer": _sharded()}, r"in none of the modules.*load\(like="),  # it is made with one
    ],
)
def test_what_cannot_be_resumed(tmp_path: Path, state: Any, says: str) -> None:
    """It is refused before anything is read; the error says what to give."""
    with (
        Checkpointer(tmp_path, writer="buffered") as ckpt,
        pytest.raises(UsageError, match=says),
    ):
        ckpt.resume(state)
