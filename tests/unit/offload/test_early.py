"""Updates during backward: the bits of an update in step, whatever happens in between."""

from __future__ import annotations

import gc
import random
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.offload_training import (
    OPTIONS,
    VALUES,
    Snapshot,
    Stock,
    assert_equal,
    backward,
    give_gradients,
    gradient,
    make_parameters,
    snapshot,
    stock_snapshots,
)

from iobench.errors import DataMismatchError, TransferError
from iobench.offload import Adam, AdamW

_CHUNKS = 7
_AGAIN = r"\d of 7 chunks were updated during backward and again in step"


@pytest.fixture(scope="module")
def expected() -> list[Snapshot]:
    """The snapshots of the stock training after each step."""
    torch.set_num_threads(1)
    return stock_snapshots(4)


def _made(directory: Path, parameters: list[torch.nn.Parameter], **options: Any) -> AdamW:
    return AdamW(parameters, directory, **VALUES, **(OPTIONS | {"overlap": True} | options))


def _until_early(optimizer: AdamW, chunks: int = _CHUNKS) -> None:
    """Wait until so many chunks have been updated before `step`."""
    deadline = time.monotonic() + 60
    while len(optimizer._state.engine.updated_early) < chunks:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def _counted(optimizer: AdamW) -> list[int]:
    """A list that gets, for each step, how many chunks need no update in it."""
    found: list[int] = []
    real = optimizer._state.engine.step

    def step(*arguments: Any, **options: Any) -> None:
        found.append(len(options["early"]))
        real(*arguments, **options)

    optimizer._state.engine.step = step
    return found


def test_same_bits_in_any_order_of_arrival(tmp_path: Path, expected: list[Snapshot]) -> None:
    """Parameters keep their values until `step`, which then updates nothing more."""
    parameters, orders = make_parameters(), random.Random(3)
    with _made(tmp_path, parameters) as optimizer:
        counted = _counted(optimizer)
        for step in range(4):
            before = [parameter.detach().clone() for parameter in parameters]
            optimizer.zero_grad(set_to_none=bool(step % 2))
            for index in orders.sample(range(5), 5):
                (parameters[index] * gradient(parameters[index], step, index)).sum().backward()
            _until_early(optimizer)
            assert all(map(torch.equal, parameters, before))
            optimizer.step()
            optimizer.pin(step)
            optimizer.wait(step)
        assert counted == [_CHUNKS] * 4
    with AdamW.resume(make_parameters(1), tmp_path) as again:
        assert_equal(snapshot(again), expected[3])


def _scale(optimizer: AdamW) -> None:
    torch._foreach_mul_([p.grad for p in optimizer.param_groups[0]["params"]], 2.0)


def _scale_data(optimizer: AdamW) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.data.mul_(0.5)  # torch's version counter does not change


def _replace(optimizer: AdamW) -> None:
    parameter = optimizer.param_groups[0]["params"][2]
    parameter.grad = parameter.grad + 1


def _remove(optimizer: AdamW) -> None:
    optimizer.param_groups[0]["params"][0].grad = None


def _again(optimizer: AdamW) -> None:
    backward(optimizer.param_groups[0]["params"], 7)


def _new_batch(optimizer: AdamW) -> None:
    optimizer.zero_grad()
    _again(optimizer)


def _change_lr(optimizer: AdamW) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def _write(optimizer: AdamW) -> None:
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0][17] = 3.0


@pytest.mark.parametrize(
    "change", [_scale, _scale_data, _replace, _remove, _again, _new_batch, _change_lr, _write]
)
def test_changes_between_backward_and_step(
    change: Callable[[AdamW], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that were updated with other values are updated again, from the bytes before; said
    once. The same calls without overlap give the expected bits."""
    monkeypatch.setattr("iobench.offload.early._LONGEST_PAUSE", 0)
    results = []
    for overlap in (True, False):
        parameters = make_parameters()
        with _made(tmp_path / str(overlap), parameters, overlap=overlap) as optimizer:
            for step in range(4):
                optimizer.zero_grad()
                backward(parameters, step)
                if overlap:
                    _until_early(optimizer)
                if step in (0, 2):
                    change(optimizer)
                if overlap and step == 0:
                    with pytest.warns(RuntimeWarning, match=_AGAIN):
                        optimizer.step()
                else:
                    optimizer.step()
            results.append(snapshot(optimizer))
    assert_equal(*results)


def test_only_changed_chunks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And after such a step, the next one has no overlap, and the one after it has."""
    parameters = make_parameters()
    stock = Stock([p.detach().clone() for p in parameters])
    with _made(tmp_path, parameters) as optimizer:
        counted = _counted(optimizer)
        for step in range(3):
            backward(parameters, step)
            if step != 1:
                _until_early(optimizer)
            parameters[3].grad.mul_(2 if step == 0 else 1)
            for parameter, model in zip(parameters, stock.model, strict=True):
                model.grad = parameter.grad.clone()
            if step == 0:
                with pytest.warns(RuntimeWarning, match="1 of 7 chunks"):
                    optimizer.step()
            else:
                optimizer.step()
            stock.step()
            optimizer.zero_grad()
        assert counted == [_CHUNKS - 1, 0, _CHUNKS]
        assert_equal(snapshot(optimizer), stock.snapshot())


def test_accumulation(tmp_path: Path) -> None:
    """Inside `accumulate` nothing is updated; the last backward does."""
    parameters = make_parameters()
    stock = Stock([p.detach().clone() for p in parameters])
    with _made(tmp_path, parameters) as optimizer:
        counted = _counted(optimizer)
        for step in range(2):
            optimizer.zero_grad()
            with optimizer.accumulate():
                backward(parameters, 10 + step)
                backward(parameters, 20 + step)
            assert optimizer._state.early._model is None
            backward(parameters, step)
            _until_early(optimizer)
            for parameter, model in zip(parameters, stock.model, strict=True):
                model.grad = parameter.grad.clone()
            optimizer.step()
            stock.step()
        assert counted == [_CHUNKS] * 2
        assert_equal(snapshot(optimizer), stock.snapshot())


def test_an_exception_in_backward(tmp_path: Path, expected: list[Snapshot]) -> None:
    """Nothing of that batch is left: neither in the next step nor on storage."""
    parameters = make_parameters()

    def fails(_: torch.Tensor) -> None:
        raise ArithmeticError("in backward")

    with _made(tmp_path, parameters) as optimizer:
        for step in range(2):
            optimizer.zero_grad()
            backward(parameters, step)
            optimizer.step()
        optimizer.zero_grad()
        hook = parameters[0].register_hook(fails)  # fails last
        with pytest.raises(ArithmeticError):
            backward(parameters, 9)
        hook.remove()
        _until_early(optimizer, 1)
        optimizer.wait()
        assert optimizer.durable() == 2
        optimizer.zero_grad()
        backward(parameters, 2)
        with pytest.warns(RuntimeWarning, match="again in step"):
            optimizer.step()
        assert_equal(snapshot(optimizer), expected[2])
        optimizer._state.early._stopped = False  # no pause
        optimizer.zero_grad()
        backward(parameters, 8)
        _until_early(optimizer)  # all chunks are written, and there is no step
    with AdamW.resume(make_parameters(1), tmp_path, verify=True) as again:
        assert again.updates == 3
        assert_equal(snapshot(again), expected[2])


def test_other_calls_between_backward_and_step(tmp_path: Path, expected: list[Snapshot]) -> None:
    """Pins, the state and loaded state, after a part of the chunks was updated."""
    parameters = make_parameters()
    with _made(tmp_path, parameters) as optimizer:
        for step in range(4):
            optimizer.zero_grad()
            backward(parameters, step)
            if step == 0:
                assert optimizer.updates == 0
            if step == 1:
                optimizer.pin(11)
            if step == 2:
                _until_early(optimizer)
                assert_equal(snapshot(optimizer), expected[1])
                state = optimizer.state_dict()
                optimizer.load_state_dict(state)
            optimizer.step()
        assert_equal(snapshot(optimizer), expected[3])
    with AdamW.resume(make_parameters(1), tmp_path, step=11) as again:
        assert_equal(snapshot(again), expected[0])


class _Watched(torch.nn.Parameter):
    """Notes which threads look at its gradient."""

    threads: ClassVar[set[str]] = set()

    @property
    def grad(self) -> torch.Tensor | None:
        self.threads.add(threading.current_thread().name)
        return torch.Tensor.grad.__get__(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        torch.Tensor.grad.__set__(self, value)


def test_only_hooks_look_at_gradients(tmp_path: Path) -> None:
    """autograd replaces `grad` without the GIL: another thread that reads it corrupts memory."""
    parameters = [_Watched(parameter.detach()) for parameter in make_parameters()]
    with _made(tmp_path, parameters) as optimizer:
        backward(parameters, 0)
        _until_early(optimizer)
        optimizer.step()
    assert _Watched.threads == {threading.current_thread().name}


def test_gradients_that_do_not_come(tmp_path: Path) -> None:
    """Parameters without a gradient, a frozen one, and one that is frozen no more."""
    parameters = make_parameters()
    parameters[3].requires_grad_(False)
    stock = Stock([p.detach().clone() for p in parameters])
    with _made(tmp_path, parameters) as optimizer:
        for step in range(5):
            optimizer.zero_grad()
            parameters[3].requires_grad_(step >= 3)
            used = [p for p in parameters if p.requires_grad and (p is not parameters[1] or step)]
            backward(parameters, step, used)
            for parameter, model in zip(parameters, stock.model, strict=True):
                model.grad = None if parameter.grad is None else parameter.grad.clone()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore" if step == 3 else "error")
                optimizer.step()
            stock.step()
        assert_equal(snapshot(optimizer), stock.snapshot())


@pytest.mark.slow
def test_damage_is_found_during_backward(tmp_path: Path) -> None:
    """It is the error of `step`, and the parameters are those before."""
    with _made(tmp_path, make_parameters()) as optimizer:
        give_gradients(optimizer.param_groups[0]["params"], 0)
        optimizer.step()
    with (tmp_path / "state").open("r+b") as file:
        file.seek(4096 + 100)
        file.write(b"damage")
    parameters = make_parameters(1)
    optimizer = AdamW.resume(parameters, tmp_path, overlap=True)
    before = [parameter.detach().clone() for parameter in parameters]
    backward(parameters, 1)
    optimizer._state.early._thread.join(60)
    with pytest.raises(DataMismatchError, match="chunk 0 differs from its checksum"):
        optimizer.step()
    assert all(map(torch.equal, parameters, before))
    optimizer._state.engine.abandon()
    optimizer._state.engine = None


def test_an_abandoned_optimizer_ends_its_threads(tmp_path: Path) -> None:
    """In the middle of backward. Its hooks are gone too."""
    parameters = make_parameters()
    optimizer = _made(tmp_path, parameters)
    backward(parameters[1:], 0)
    del optimizer
    gc.collect()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("iobench-offload")]
    assert not any(parameter._post_accumulate_grad_hooks for parameter in parameters)
    with Adam(parameters, tmp_path, lr=0.1, **OPTIONS, overlap=True) as other:  # the lock is free
        backward(parameters, 0)
        other.step()


def test_an_interrupt_while_step_waits_for_storage(
    tmp_path: Path, expected: list[Snapshot]
) -> None:
    """Ctrl-C that is caught, as in a notebook: the parameters are those of the step."""
    parameters = make_parameters()
    with _made(tmp_path, parameters, max_backlog=0) as optimizer:
        backward(parameters, 0)
        optimizer.step()
        optimizer.zero_grad()
        backward(parameters, 1)
        _until_early(optimizer)
        stream = optimizer._state.engine
        real = stream._wait_for

        def interrupted(_: object) -> None:
            stream._wait_for = real
            raise KeyboardInterrupt

        stream._wait_for = interrupted
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        assert optimizer.updates == 2
        for step in (2, 3):
            optimizer.zero_grad()
            backward(parameters, step)
            optimizer.step()
        assert_equal(snapshot(optimizer), expected[3])


def test_an_interrupt_before_the_commit(tmp_path: Path, expected: list[Snapshot]) -> None:
    """The next step raises; what is durable is the step before."""
    parameters = make_parameters()
    optimizer = _made(tmp_path, parameters, max_backlog=0)
    give_gradients(parameters, 0)
    optimizer.step()
    stream = optimizer._state.engine

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    real, stream._submit = stream._submit, interrupted
    give_gradients(parameters, 1)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    stream._submit = real
    with pytest.raises(RuntimeError, match="a step was interrupted"):
        optimizer.step()
    with pytest.raises(TransferError):
        optimizer.close()
    with AdamW.resume(make_parameters(1), tmp_path) as again:
        assert again.updates == 1
        assert_equal(snapshot(again), expected[0])
