"""SGD with offloaded state: the bits of torch.optim.SGD(fused=True)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.offload_training import (
    OPTIONS,
    Stock,
    assert_equal,
    backward,
    give_gradients,
    make_parameters,
    snapshot,
)

from iobench.errors import OptionError, UsageError
from iobench.offload import SGD, AdamW
from iobench.offload.stock_files import export, import_stock


def _stock(parameters: list[torch.nn.Parameter], **values: Any) -> Stock:
    stock = Stock([p.detach().clone() for p in parameters])
    # One group for each: torch has one flag for the first update of all in a group.
    groups = [{"params": [master]} for master in stock.masters]
    stock.optimizer = torch.optim.SGD(groups, fused=True, **values)
    return stock


def _train(optimizer: SGD, stock: Stock, steps: range) -> None:
    parameters = optimizer.param_groups[0]["params"]
    for step in steps:
        give_gradients(parameters, step)
        give_gradients(stock.model, step)
        if step == 0:
            for model in (parameters, stock.model):
                model[2].grad = None  # its momentum begins later
        optimizer.step()
        stock.step()


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.01, "maximize": True},
    ],
)
def test_same_bits(values: dict[str, Any], tmp_path: Path) -> None:
    """Over a resume too. Without momentum the state is the master weights alone."""
    parameters = make_parameters()
    stock = _stock(parameters, lr=0.01, **values)
    with SGD(parameters, tmp_path, lr=0.01, **values, **OPTIONS) as optimizer:
        _train(optimizer, stock, range(3))
        assert_equal(snapshot(optimizer), stock.snapshot())
        assert optimizer._engine.layout.tensors[1:] == (("momentum_buffer",) if values else ())
    with SGD.resume(make_parameters(1), tmp_path) as optimizer:
        _train(optimizer, stock, range(3, 6))
        assert_equal(snapshot(optimizer), stock.snapshot())


def test_during_backward(tmp_path: Path) -> None:
    """In a process of its own, and updated as the gradients arrive."""
    parameters = make_parameters()
    stock = _stock(parameters, lr=0.01, momentum=0.9)
    options = OPTIONS | {"engine": "process", "overlap": True}
    with SGD(parameters, tmp_path, lr=0.01, momentum=0.9, **options) as optimizer:
        for step in range(3):
            optimizer.zero_grad()
            backward(parameters, step)
            give_gradients(stock.model, step)
            optimizer.step()
            stock.step()
    with SGD.resume(make_parameters(1), tmp_path) as again:
        assert_equal(snapshot(again), stock.snapshot())


def test_groups(tmp_path: Path) -> None:
    """One with momentum, and one without."""
    parameters = make_parameters()

    def groups(tensors: list[torch.Tensor]) -> list[dict[str, Any]]:
        return [{"params": tensors[::2], "momentum": 0.9}, {"params": tensors[1::2]}]

    stock = Stock([p.detach().clone() for p in parameters])
    stock.optimizer = torch.optim.SGD(groups(stock.masters), lr=0.1, fused=True)
    with SGD(groups(list(parameters)), tmp_path, lr=0.1, **OPTIONS) as optimizer:
        for step in range(3):
            give_gradients(parameters, step)
            give_gradients(stock.model, step)
            optimizer.step()
            stock.step()
        found = stock.snapshot()
        assert_equal(snapshot(optimizer), [found[index] for index in (0, 2, 4, 1, 3)])


def test_state_dict_of_stock_and_back(tmp_path: Path) -> None:
    """A stock state_dict goes on here with the same bits, and ours goes on there."""
    parameters = [p.float() for p in make_parameters()]
    values = {"lr": 0.01, "momentum": 0.9, "dampening": 0.5}
    stock = _stock(parameters, **values)
    stock.optimizer = torch.optim.SGD(stock.masters, fused=True, **values)
    for step in range(2):
        give_gradients(stock.model, step)
        stock.step()
    ours = [torch.nn.Parameter(p.clone()) for p in stock.model]
    with SGD(ours, tmp_path, lr=1.0, momentum=0.1, **OPTIONS) as optimizer:
        optimizer.load_state_dict(stock.optimizer.state_dict())
        assert optimizer.param_groups[0]["dampening"] == 0.5
        _train(optimizer, stock, range(2, 4))
        assert_equal(snapshot(optimizer), stock.snapshot())
        there = _stock(ours, lr=1.0)
        there.optimizer = torch.optim.SGD(there.masters, fused=True)
        there.optimizer.load_state_dict(optimizer.state_dict())
        for one in (there, stock):
            give_gradients(one.model, 5)
            one.step()
        assert_equal(there.snapshot(), stock.snapshot())


def test_stock_files(tmp_path: Path) -> None:
    """Exported and imported again: the training goes on with the same bits."""
    parameters = [torch.nn.Parameter(p.detach().float()) for p in make_parameters()]
    stock = _stock(parameters, lr=0.01, momentum=0.9)
    named = [(f"p{index}", parameter) for index, parameter in enumerate(parameters)]
    with SGD(named, tmp_path / "one", lr=0.01, momentum=0.9, **OPTIONS) as optimizer:
        _train(optimizer, stock, range(3))
    files = tmp_path / "optimizer.pt", tmp_path / "model.safetensors"
    for file in files:
        export(tmp_path / "one", "latest", file)
    state = torch.load(files[0], weights_only=True)["state"]
    assert all(list(one) == ["momentum_buffer"] for one in state.values())
    import_stock(*files, tmp_path / "two", pins=1, memory="2GiB")
    again = [(name, torch.nn.Parameter(torch.zeros_like(p))) for name, p in named]
    with SGD.resume(again, tmp_path / "two") as optimizer:
        _train(optimizer, stock, range(3, 5))
        assert_equal(snapshot(optimizer), stock.snapshot())


def test_what_is_refused(tmp_path: Path) -> None:
    """Values that torch refuses, a momentum that comes later, and the state of another class."""
    for values in ({"momentum": -1.0}, {"nesterov": True}, {"lr": -1.0}):
        with pytest.raises(OptionError):
            SGD(make_parameters(), tmp_path / "none", **values, **OPTIONS)
    assert not (tmp_path / "none").exists()
    parameters = make_parameters()
    with SGD(parameters, tmp_path / "one", lr=0.1, **OPTIONS) as optimizer:
        give_gradients(parameters, 0)
        optimizer.step()
        optimizer.param_groups[0]["momentum"] = 0.9
        with pytest.raises(UsageError, match=r"momentum=0\.9: the state has no momentum"):
            optimizer.step()
        state = optimizer.state_dict()
    with pytest.raises(UsageError, match="has the state of SGD: use its resume"):
        AdamW.resume(make_parameters(), tmp_path / "one")
    with (
        AdamW(make_parameters(), tmp_path / "two", **OPTIONS) as other,
        pytest.raises(UsageError, match="the state is that of SGD; the optimizer is AdamW"),
    ):
        other.load_state_dict(state)
