"""iobench offload: what is there, and stock files of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.offload_training import OPTIONS, VALUES, assert_equal, give_gradients

from iobench.offload import AdamW

Command = Callable[..., CompletedProcess[str]]


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Linear(50, 3))


def _train(optimizer: Any, parameters: list[torch.Tensor], steps: range) -> None:
    for step in steps:
        give_gradients(parameters, step)
        optimizer.step()


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, torch.nn.Module, torch.optim.AdamW]:
    """A directory with a pin after 3 of 5 steps, and the stock training up to the pin."""
    ours, stock = _model(), _model()
    optimizer = AdamW(ours.named_parameters(), tmp_path / "state", **VALUES, **OPTIONS)
    with optimizer:
        _train(optimizer, list(ours.parameters()), range(3))
        optimizer.pin(30)
        _train(optimizer, list(ours.parameters()), range(3, 5))
    same = torch.optim.AdamW(stock.named_parameters(), fused=True, **VALUES)
    _train(same, list(stock.parameters()), range(3))
    return tmp_path / "state", stock, same


def test_show(trained: tuple[Path, Any, Any], iobench_inside: Command) -> None:
    """The generations with their pins, while a trainer is at work."""
    directory = trained[0]
    with AdamW.resume(_model().named_parameters(), directory):
        table = iobench_inside("offload", "show", directory)
        assert table.returncode == 0, table.stderr
    assert "4 parameters, 2,203 elements in 3 chunks" in table.stdout
    lines = iobench_inside("offload", "show", directory).stdout.splitlines()
    kept = [line.split() for line in lines if line.endswith(" kept")]
    assert [words[1:3] for words in kept] == [["5", "-"], ["3", "30"]]
    missing = iobench_inside("offload", "show", directory.parent)
    assert missing.returncode == 2
    assert "holds no offload state" in missing.stderr


def test_export(
    trained: tuple[Path, torch.nn.Module, torch.optim.AdamW],
    tmp_path: Path,
    iobench_inside: Command,
) -> None:
    """Stock torch and safetensors read the files, and have the bits of the stock training."""
    directory, model, same = trained
    for name in ("model.safetensors", "optimizer.pt"):
        done = iobench_inside("offload", "export", directory, "--step", 30, "-o", tmp_path / name)
        assert done.returncode == 0, done.stderr
    tensors = load_file(tmp_path / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.equal(tensors[name], parameter)
    state, wanted = torch.load(tmp_path / "optimizer.pt"), same.state_dict()
    assert_equal(list(state["state"].values()), list(wanted["state"].values()))
    assert state["param_groups"] == [{**wanted["param_groups"][0]}]
    for arguments, message in (
        (("--step", "7", "-o", tmp_path / "a.pt"), "step 7 is not pinned"),
        (("--step", "x", "-o", tmp_path / "a.pt"), "--step x: a number, pinned or latest"),
        (("-o", tmp_path / "a.bin"), "its name must end with"),
    ):
        done = iobench_inside("offload", "export", directory, *arguments)
        assert done.returncode == 2
        assert message in done.stderr
    assert not (tmp_path / "a.pt").exists()
