"""A small training with offloaded state, and the same training by stock torch."""

import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from iobench.offload import AdamW

Snapshot = list[dict[str, torch.Tensor]]
"""All state of each parameter, and the parameter itself as `model`."""

SHAPES: Sequence[tuple[tuple[int, ...], torch.dtype]] = (
    ((3000,), torch.bfloat16),  # over three chunks
    ((37, 5), torch.float32),
    ((999,), torch.bfloat16),  # has elements after the last whole vector
    ((), torch.float16),
    ((2, 1024), torch.float16),
)
VALUES = {"lr": 1e-2, "weight_decay": 0.1}
OPTIONS: dict[str, Any] = {"chunk_elements": 1024, "memory": "1MiB", "block_size": "8KiB"}


def make_parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    """Parameters of three dtypes, in seven chunks of 1024 elements."""
    made = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=made).to(dtype)) for shape, dtype in SHAPES
    ]


def gradient(parameter: torch.Tensor, step: int, index: int) -> torch.Tensor:
    """The gradient of a parameter in a step: the same in each process."""
    made = torch.Generator().manual_seed(step * 1000 + index)
    return torch.randn(parameter.shape, generator=made).to(parameter.dtype)


def give_gradients(parameters: Sequence[torch.Tensor], step: int) -> None:
    for index, parameter in enumerate(parameters):
        parameter.grad = gradient(parameter, step, index)


def backward(
    parameters: Sequence[torch.Tensor], step: int, used: Sequence[torch.Tensor] | None = None
) -> None:
    """Let autograd make the gradients of `give_gradients`, or of the `used` parameters only."""
    loss = torch.zeros(())
    for index, parameter in enumerate(parameters):
        if used is None or any(parameter is one for one in used):
            loss = loss + (parameter * gradient(parameter, step, index)).sum()
    loss.backward()


class Stock:
    """The same training by torch.optim.AdamW(fused=True) on fp32 master weights."""

    def __init__(self, parameters: Sequence[torch.Tensor], **values: Any) -> None:
        self.model = parameters
        self.masters = [p.detach().float().clone().requires_grad_() for p in parameters]
        self.optimizer = torch.optim.AdamW(self.masters, fused=True, **(VALUES | values))

    def step(self) -> None:
        """Update the masters by the gradients of the model, which then gets their values."""
        for parameter, master in zip(self.model, self.masters, strict=True):
            grad = parameter.grad
            master.grad = None if grad is None else grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(self.model, self.masters, strict=True):
                parameter.copy_(master)

    def snapshot(self) -> Snapshot:
        """Copies of all state, like `snapshot` of an offloaded optimizer."""
        found = []
        for parameter, master in zip(self.model, self.masters, strict=True):
            state = {k: v.clone() for k, v in self.optimizer.state[master].items()}
            if parameter.dtype != torch.float32:
                state["master"] = master.detach().clone()
            found.append({**state, "model": parameter.detach().clone()})
        return found


def snapshot(optimizer: AdamW) -> Snapshot:
    """The state of each parameter, read from storage, and the parameter itself."""
    state = optimizer.state_dict()["state"]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [
        {**state.get(index, {}), "model": parameter.detach().clone()}
        for index, parameter in enumerate(parameters)
    ]


def assert_equal(
    found: Sequence[dict[str, torch.Tensor]], expected: Sequence[dict[str, torch.Tensor]]
) -> None:
    """Every bit of every tensor, and the same tensors."""
    assert len(found) == len(expected)
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.keys() == other.keys(), index
        for name, tensor in one.items():
            assert tensor.dtype == other[name].dtype, (index, name)
            same = torch.equal(
                tensor.view(-1).view(torch.uint8), other[name].view(-1).view(torch.uint8)
            )
            assert same, f"{name} of parameter {index} differs"


def stock_snapshots(steps: int) -> list[Snapshot]:
    """The snapshots of a stock training after 1 to `steps` steps."""
    stock = Stock(make_parameters())
    found = []
    for step in range(steps):
        give_gradients(stock.model, step)
        stock.step()
        found.append(stock.snapshot())
    return found


def train_and_report(
    directory: Path, steps: int, *, pin_every: int = 2, overlap: bool = False
) -> None:
    """Train until there are `steps` updates; report the durable ones on stdout.

    With `overlap` a real backward makes the gradients, and one in three is of another batch first.
    """
    parameters = make_parameters()
    own: dict[str, Any] = {"overlap": overlap}
    if has_generation(directory):
        optimizer = AdamW.resume(parameters, directory, memory=OPTIONS["memory"], **own)
    else:
        optimizer = AdamW(parameters, directory, **VALUES, **OPTIONS, **own)
    for step in range(optimizer.updates, steps):
        if not overlap:
            give_gradients(parameters, step)
        else:
            for batch in (step,) if step % 3 else (step + 7, step):
                optimizer.zero_grad()
                backward(parameters, batch)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # some chunks are updated again
            optimizer.step()
        if (step + 1) % pin_every == 0:
            optimizer.pin(step + 1, {"step": step + 1})
        say("durable", optimizer.durable())
        for pinned in optimizer.pinned():
            say("pinned", pinned)
    optimizer.close()
    say("done", steps)


def has_generation(directory: Path) -> bool:
    """Whether a state directory has a durable generation."""
    from iobench.offload.files import read_layout
    from iobench.offload.layout import read_records

    if not (directory / "layout.json").exists():
        return False
    return bool(read_records(directory, read_layout(directory)))


def say(what: str, number: int) -> None:
    """Report a number to the test."""
    # One write, because a kill falls between two.
    os.write(sys.stdout.fileno(), f"{what} {number}\n".encode())


def reports(lines: Iterable[str]) -> dict[str, int]:
    """The largest number of each kind that `train_and_report` has written."""
    found: dict[str, int] = {}
    for line in lines:
        what, number = line.split()
        found[what] = max(found.get(what, 0), int(number))
    return found
