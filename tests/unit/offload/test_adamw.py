"""AdamW with offloaded state: the bits of torch.optim.AdamW(fused=True), whatever the chunks."""

from __future__ import annotations

import copy
import gc
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.offload_training import (
    OPTIONS,
    VALUES,
    Stock,
    assert_equal,
    give_gradients,
    gradient,
    make_parameters,
    snapshot,
)

from iobench.errors import OptionError, StateError, TargetError, TransferError, UsageError
from iobench.offload import Adam, AdamW


def _pair(directory: Path, **values: Any) -> tuple[AdamW, Stock]:
    parameters = make_parameters()
    ours = (*OPTIONS, "pins", "max_backlog", "iodepth")
    options = OPTIONS | {k: v for k, v in values.items() if k in ours}
    group = VALUES | {k: v for k, v in values.items() if k not in ours}
    optimizer = AdamW(parameters, directory, **group, **options)
    return optimizer, Stock([p.detach().clone() for p in parameters], **group)


def _train(optimizer: AdamW, stock: Stock, steps: range) -> None:
    parameters = optimizer.param_groups[0]["params"]
    for step in steps:
        give_gradients(parameters, step)
        give_gradients(stock.model, step)
        optimizer.step()
        stock.step()


@pytest.mark.parametrize(
    "options",
    [
        {"chunk_elements": 1024},
        {"chunk_elements": 4096, "block_size": "4KiB"},
        {"chunk_elements": 2048, "memory": "100KiB", "iodepth": 1},  # two buffers
        {"chunk_elements": None, "memory": "2GiB"},  # one chunk
        {"max_backlog": 0, "pins": 0},
        {"max_backlog": 3, "pins": 3},
        {"maximize": True, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.0},
    ],
)
def test_same_bits(options: dict[str, Any], tmp_path: Path) -> None:
    """Parameters, master weights, moments and counters, after every few steps."""
    optimizer, stock = _pair(tmp_path, **options)
    with optimizer:
        for steps in (range(1), range(1, 5), range(5, 12)):
            _train(optimizer, stock, steps)
            assert_equal(snapshot(optimizer), stock.snapshot())
        assert optimizer.durable() == optimizer.updates == 12


def test_same_bits_with_threads(tmp_path: Path) -> None:
    """torch may use several threads, for us and for the stock optimizer in different numbers."""
    torch.set_num_threads(2)
    optimizer, stock = _pair(tmp_path, chunk_elements=4096)
    with optimizer:
        _train(optimizer, stock, range(5))
        torch.set_num_threads(1)
        assert_equal(snapshot(optimizer), stock.snapshot())


def test_parameters_without_gradients(tmp_path: Path) -> None:
    """They keep their state and counter, and get one with their first gradient."""
    optimizer, stock = _pair(tmp_path)
    parameters = optimizer.param_groups[0]["params"]
    with optimizer:
        for step in range(6):
            give_gradients(parameters, step)
            give_gradients(stock.model, step)
            for model in (parameters, stock.model):
                for index in {0: (0, 2), 1: (4,), 2: (), 3: range(5)}.get(step, ()):
                    model[index].grad = None
            optimizer.step()
            if step != 3:
                stock.step()
        assert_equal(snapshot(optimizer), stock.snapshot())
        assert optimizer.updates == 5  # no gradient at all is no update


def test_a_chunk_that_does_not_change_keeps_its_slot(tmp_path: Path) -> None:
    """Only chunks with a gradient are written."""
    optimizer, stock = _pair(tmp_path)
    with optimizer:
        _train(optimizer, stock, range(1))
        for parameter in optimizer.param_groups[0]["params"][1:]:
            parameter.grad = None
        optimizer.step()
        optimizer.wait()
        written = optimizer._state.engine.store.newest.rows["written"].tolist()
    assert written == [2, 2, 2, *[1] * (len(written) - 3)]


def test_groups_and_schedulers(tmp_path: Path) -> None:
    """Each group has its values, and a scheduler changes them."""
    parameters = make_parameters()
    stock = Stock([p.detach().clone() for p in parameters])

    def groups(tensors: list[torch.Tensor]) -> list[dict[str, Any]]:
        return [
            {"params": tensors[::2], "lr": 1e-3},
            {"params": tensors[1::2], "weight_decay": 0.0, "betas": (0.8, 0.99)},
        ]

    stock.optimizer = torch.optim.AdamW(groups(stock.masters), fused=True, **VALUES)
    optimizer = AdamW(groups(list(parameters)), tmp_path, **VALUES, **OPTIONS)
    schedulers = [
        torch.optim.lr_scheduler.CosineAnnealingLR(one, T_max=8)
        for one in (optimizer, stock.optimizer)
    ]
    for step in range(4):
        give_gradients(parameters, step)
        give_gradients(stock.model, step)
        optimizer.step()
        stock.step()
        for scheduler in schedulers:
            scheduler.step()
    order = [0, 2, 4, 1, 3]
    assert_equal(snapshot(optimizer), [stock.snapshot()[index] for index in order])
    optimizer.pin(4)
    optimizer.close()
    again = AdamW.resume(groups(make_parameters(1)), tmp_path)
    with again:
        for old, new in zip(optimizer.param_groups, again.param_groups, strict=True):
            assert {k: v for k, v in old.items() if k != "params"} == {
                k: v for k, v in new.items() if k != "params"
            }


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.filterwarnings("ignore:.*chunks were updated during backward:RuntimeWarning")
def test_clipping_accumulation_and_closures(overlap: bool, tmp_path: Path) -> None:
    """What a trainer does to gradients before `step`, on a real backward with a tied parameter.
    In some of the steps the norm is below the limit: clipping changes nothing then."""
    torch.manual_seed(0)

    def model() -> torch.nn.Module:
        made = torch.nn.Sequential(
            torch.nn.Embedding(50, 40), torch.nn.Linear(40, 40), torch.nn.Linear(40, 50, bias=False)
        )
        made[2].weight = made[0].weight
        return made

    ours, other = model(), model()
    other.load_state_dict(ours.state_dict())
    optimizer = AdamW(ours.parameters(), tmp_path, **VALUES, **OPTIONS, overlap=overlap)
    stock = torch.optim.AdamW(other.parameters(), fused=True, **VALUES)

    def loss_of(network: torch.nn.Module, step: int) -> torch.Tensor:
        batch = torch.arange(20).view(2, 10) + step
        return torch.nn.functional.cross_entropy(network(batch).flatten(0, 1), batch.flatten() + 1)

    with optimizer:
        for step in range(6):
            losses = []
            for network, one in ((ours, optimizer), (other, stock)):

                def closure(
                    network: torch.nn.Module = network,
                    one: torch.optim.Optimizer = one,
                    step: int = step,
                ) -> torch.Tensor:
                    one.zero_grad()
                    for part in range(1 + step % 3):  # accumulated
                        loss = loss_of(network, step + part)
                        loss.backward()
                    most = 1e3 if step in (0, 3) else 0.1
                    torch.nn.utils.clip_grad_norm_(network.parameters(), most)
                    return loss

                losses.append(one.step(closure).item())
            assert losses[0] == losses[1]
        for mine, theirs in zip(ours.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.filterwarnings("ignore:.*chunks were updated during backward:RuntimeWarning")
def test_grad_scaler(overlap: bool, tmp_path: Path) -> None:
    """A step with infinite gradients is skipped, though its chunks were updated, and others are
    unscaled before."""
    parameters = [torch.nn.Parameter(p.float()) for p in make_parameters()]
    stock = Stock([p.detach().clone() for p in parameters])
    optimizer = AdamW(parameters, tmp_path, **VALUES, **OPTIONS, overlap=overlap)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with optimizer:
        for step in range(4):
            optimizer.zero_grad()
            if overlap:
                optimizer._state.early._stopped = False  # no pause after a change
            for index, parameter in enumerate(parameters):
                loss = (parameter * gradient(parameter, step, index)).sum()
                scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
            scaler.unscale_(optimizer)
            for parameter, model in zip(parameters, stock.model, strict=True):
                model.grad = parameter.grad.clone()
            scaler.step(optimizer)
            scaler.update()
            if step != 1:
                stock.step()
        assert optimizer.updates == 3
        assert_equal(snapshot(optimizer), stock.snapshot())


def test_what_the_trainer_writes_is_taken(tmp_path: Path) -> None:
    """Loaded weights reach the masters; masters of unchanged elements keep their precision."""
    optimizer, stock = _pair(tmp_path)
    parameters = optimizer.param_groups[0]["params"]
    with optimizer:
        _train(optimizer, stock, range(2))
        with torch.no_grad():
            for index, parameter in enumerate(parameters):
                if parameter.dim():
                    parameter[:1] = index + 0.5
                    stock.model[index][:1] = stock.masters[index][:1] = index + 0.5
            parameters[0].add_(0)  # a broadcast of the same values, such as DDP's
        _train(optimizer, stock, range(2, 4))
        assert_equal(snapshot(optimizer), stock.snapshot())


def test_state_dict_of_stock_and_back(tmp_path: Path) -> None:
    """A stock state_dict continues here, ours continues there, and both give the same bits."""
    parameters = [p.float() for p in make_parameters()]
    stock = Stock([p.detach().clone() for p in parameters])
    for step in range(3):
        give_gradients(stock.model, step)
        stock.step()
    ours = [torch.nn.Parameter(p.clone()) for p in stock.model]
    optimizer = AdamW(ours, tmp_path, **OPTIONS)
    with optimizer:
        optimizer.load_state_dict(stock.optimizer.state_dict())
        assert optimizer.param_groups[0]["lr"] == VALUES["lr"]
        _train(optimizer, stock, range(3, 6))
        exported = optimizer.state_dict()
        assert_equal(snapshot(optimizer), stock.snapshot())
    there = Stock([p.detach().clone() for p in ours], lr=0.5)
    there.optimizer.load_state_dict(exported)
    for step in range(6, 8):
        for one in (there, stock):
            give_gradients(one.model, step)
            one.step()
    assert_equal(there.snapshot(), stock.snapshot())


def test_state_dict_has_the_masters_of_16_bit_parameters(tmp_path: Path) -> None:
    """Loaded into another directory, the training goes on with the same bits."""
    optimizer, stock = _pair(tmp_path / "one")
    _train(optimizer, stock, range(3))
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.close()
    parameters = make_parameters(5)
    parameters[1] = torch.nn.Parameter(stock.model[1].clone())  # fp32: its own master
    other = AdamW(parameters, tmp_path / "two", **OPTIONS)
    with other:
        other.load_state_dict(state)
        _train(other, stock, range(3, 5))
        assert_equal(snapshot(other), stock.snapshot())
        with pytest.raises(
            UsageError, match=r"groups of \[1\] parameters; the optimizer has \[5\]"
        ):
            other.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})
        bad = copy.deepcopy(state)
        bad["state"][0]["exp_avg"] = torch.zeros(3)
        with pytest.raises(StateError, match=r"exp_avg of parameter 0 has the shape \[3\]"):
            other.load_state_dict(bad)


def test_adam(tmp_path: Path) -> None:
    """Adam adds weight decay to the gradient; the other class refuses its state."""
    parameters = make_parameters()
    stock = Stock([p.detach().clone() for p in parameters])
    stock.optimizer = torch.optim.Adam(stock.masters, fused=True, **VALUES)
    with Adam(parameters, tmp_path, **VALUES, **OPTIONS) as optimizer:
        _train(optimizer, stock, range(3))
        assert_equal(snapshot(optimizer), stock.snapshot())
    with pytest.raises(UsageError, match="has the state of Adam: use its resume"):
        AdamW.resume(make_parameters(), tmp_path)
    Adam.resume(make_parameters(), tmp_path).close()


def test_backlog(tmp_path: Path) -> None:
    """With `max_backlog=0` each step is durable on return; `wait` makes all of them so."""
    optimizer, stock = _pair(tmp_path, max_backlog=0)
    with optimizer:
        for step in range(3):
            _train(optimizer, stock, range(step, step + 1))
            assert optimizer.durable() == step + 1
    optimizer, stock = _pair(tmp_path / "lagging", max_backlog=1)
    with optimizer:
        for step in range(5):
            _train(optimizer, stock, range(step, step + 1))
            assert step <= optimizer.durable() <= step + 1
        optimizer.wait()
        assert optimizer.durable() == 5


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda d: AdamW(make_parameters(), d, lr=-1.0), OptionError, "lr=-1.0: out of range"),
        (lambda d: AdamW(make_parameters(), d, betas=(1.0, 0.9)), OptionError, "betas=1.0"),
        (lambda d: AdamW(make_parameters(), d, memory="1KiB"), UsageError, "too small"),
        (lambda d: AdamW(make_parameters(), d, memory="x"), OptionError, "memory 'x'"),
        (lambda d: AdamW(make_parameters(), d, pins=-1), OptionError, "pins=-1"),
        (lambda d: AdamW(make_parameters(), d, max_backlog=-1), OptionError, "max_backlog=-1"),
        (lambda d: AdamW(make_parameters(), d, iodepth=0), OptionError, "iodepth=0"),
        (lambda d: AdamW(make_parameters(), d, block_size=5000), OptionError, "block_size=5000"),
        (
            lambda d: AdamW([torch.nn.Parameter(torch.zeros(8, dtype=torch.float64))], d),
            UsageError,
            "parameter 0: float64 cannot be offloaded",
        ),
        (
            lambda d: AdamW([torch.nn.Parameter(torch.zeros(8, 4).t())], d),
            UsageError,
            "not contiguous",
        ),
    ],
)
def test_wrong_arguments_make_nothing(
    make: Callable[[Path], AdamW], error: type[Exception], message: str, tmp_path: Path
) -> None:
    """One clear error each, and no files."""
    there = tmp_path / "state"
    with pytest.raises(error, match=message):
        make(there)
    assert not (there / "layout.json").exists()


def test_what_is_not_possible_later(tmp_path: Path) -> None:
    """Groups that come later, copies, sparse gradients, and calls after `close`."""
    optimizer, _ = _pair(tmp_path, pins=0)
    parameters = optimizer.param_groups[0]["params"]
    with pytest.raises(UsageError, match="cannot be added"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    with pytest.raises(UsageError, match="cannot be copied"):
        copy.deepcopy(optimizer)
    with pytest.raises(UsageError, match="pins=0"):
        optimizer.pin(1)
    with pytest.raises(TargetError, match="is in use"):
        AdamW(make_parameters(), tmp_path)
    parameters[0].grad = torch.zeros(3000, dtype=torch.bfloat16).to_sparse()
    with pytest.raises(UsageError, match="only dense"):
        optimizer.step()
    parameters[0].grad = parameters[0].grad.to_dense()
    optimizer.step()
    optimizer.close()
    optimizer.close()
    with pytest.raises(UsageError, match="closed"):
        optimizer.step()


def test_an_abandoned_optimizer_ends_its_threads(tmp_path: Path) -> None:
    """Without `close`, collecting it finishes the writes and releases the directory."""
    optimizer, stock = _pair(tmp_path)
    _train(optimizer, stock, range(2))
    del optimizer
    gc.collect()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("iobench-offload")]
    with AdamW.resume(make_parameters(1), tmp_path) as again:
        assert again.updates == 2
        assert_equal(snapshot(again), stock.snapshot())


def test_collected_in_a_thread_of_its_own(tmp_path: Path) -> None:
    """The garbage collector runs in any thread, also in one that `abandon` waits for."""
    optimizer, _ = _pair(tmp_path)
    engine = optimizer._state.engine
    done = threading.Event()

    def collected(_: object) -> None:
        engine.abandon()
        done.set()

    engine._submit(collected)
    assert done.wait(30)
    for thread in threading.enumerate():
        if thread.name.startswith("iobench-offload"):
            thread.join(30)
    optimizer._state.engine = None
    optimizer._state._abandoned.detach()
    AdamW(make_parameters(), tmp_path, **OPTIONS).close()  # the lock is free


@pytest.fixture
def bfloat16_by_default() -> Iterator[None]:
    """What scripts that train in bfloat16 set."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("bfloat16_by_default")
@pytest.mark.parametrize("overlap", [False, True])
def test_steps_are_counted_under_another_default_dtype(overlap: bool, tmp_path: Path) -> None:
    """In bfloat16 300 + 1 is 300, and the update of a parameter has other bits."""
    parameters = make_parameters()
    stock = Stock([p.detach().clone() for p in parameters])
    with AdamW(parameters, tmp_path, **VALUES, **OPTIONS, overlap=overlap) as optimizer:
        _train(optimizer, stock, range(1))
        states = [optimizer.state_dict(), stock.optimizer.state_dict()]
        for state in states:
            for one in state["state"].values():
                one["step"] = torch.tensor(300.0, dtype=torch.float32)
        optimizer.load_state_dict(states[0])
        stock.optimizer.load_state_dict(states[1])
        _train(optimizer, stock, range(1, 3))
        assert_equal(snapshot(optimizer), stock.snapshot())


def test_another_default_device(tmp_path: Path) -> None:
    """Memory of the engine is that of the host."""
    parameters = make_parameters()
    stock = Stock([p.detach().clone() for p in parameters])
    give_gradients(parameters, 0)
    give_gradients(stock.model, 0)
    with AdamW(parameters, tmp_path, **VALUES, **OPTIONS) as optimizer:
        with torch.device("meta"):
            optimizer.step()
            found = snapshot(optimizer)
        stock.step()
        assert_equal(found, stock.snapshot())


def test_a_parameter_that_is_given_twice(tmp_path: Path) -> None:
    """Its state would be there twice, and be updated twice by one gradient."""
    one, other = (torch.nn.Parameter(torch.ones(5)) for _ in range(2))
    with (
        warnings.catch_warnings(action="ignore"),  # torch warns and goes on
        pytest.raises(UsageError, match="parameter 2 is parameter 0: give it once"),
    ):
        AdamW([one, other, one], tmp_path, **OPTIONS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("overlap", [False, True])
def test_parameters_with_other_data(overlap: bool, tmp_path: Path) -> None:
    """`parameter.data = ...` is seen like any other change; another dtype is refused."""
    parameters = make_parameters()
    stock = Stock([p.detach().clone() for p in parameters])
    with AdamW(parameters, tmp_path, **VALUES, **OPTIONS, overlap=overlap) as optimizer:
        _train(optimizer, stock, range(1))
        parameters[1].data = parameters[1].data * 2
        with torch.no_grad():
            stock.model[1].mul_(2)
            stock.masters[1].copy_(stock.model[1])
        _train(optimizer, stock, range(1, 3))
        assert_equal(snapshot(optimizer), stock.snapshot())
        parameters[1].data = parameters[1].data.half()
        parameters[1].grad = None
        with pytest.raises(UsageError, match=r"float16 \[37, 5\] now, the state is of float32"):
            optimizer.step()


def test_values_that_no_record_has_room_for(tmp_path: Path) -> None:
    """An error of the step or pin that has them; the training goes on without them."""
    optimizer, stock = _pair(tmp_path)
    with optimizer:
        _train(optimizer, stock, range(1))
        group = optimizer.param_groups[0]
        group["note"] = "x" * 30_000
        give_gradients(optimizer.param_groups[0]["params"], 1)
        before = [p.detach().clone() for p in group["params"]]
        for call in (optimizer.step, lambda: optimizer.pin(1)):
            with pytest.raises(UsageError, match=r"take 30\d+ bytes as JSON; there is room"):
                call()
        assert all(map(torch.equal, group["params"], before))
        del group["note"]
        _train(optimizer, stock, range(1, 2))
        assert_equal(snapshot(optimizer), stock.snapshot())


def test_a_directory_that_others_have_replaced(tmp_path: Path) -> None:
    """A job that still trains must not be told that steps are durable in files that are gone."""
    optimizer, stock = _pair(tmp_path / "state", max_backlog=0)
    _train(optimizer, stock, range(1))
    shutil.rmtree(tmp_path / "state")
    with pytest.raises(TransferError, match="was removed or replaced since this optimizer opened"):
        _train(optimizer, stock, range(1, 2))
    with pytest.raises(TransferError):
        optimizer.close()
