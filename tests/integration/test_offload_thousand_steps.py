"""1,000 steps with offloaded state have the bits of torch, in any order of arrival."""

import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.offload_training import VALUES, Stock, assert_equal, snapshot

from iobench.offload import AdamW
from iobench.units import MIB

pytestmark = pytest.mark.root
_STEPS = 1000
_DTYPES = (torch.bfloat16, torch.float32, torch.float16)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_same_bits(new_filesystem) -> None:
    """Parameters after each step, and all of the state at the end; with a learning rate that
    changes. Gradients arrive in another order in each step."""
    torch.set_num_threads(1)
    made = torch.Generator().manual_seed(7)
    values = [
        torch.randn(size, generator=made).to(dtype)
        for size, dtype in zip((1500, 185, 999), _DTYPES, strict=True)
    ]
    parameters = [torch.nn.Parameter(one) for one in values]
    stock = Stock([one.clone() for one in values], **VALUES)
    order, seen = random.Random(7), set[tuple[int, ...]]()
    directory = new_filesystem("ext4", 16 * MIB) / "state"  # in memory: a step syncs three times
    options: Any = {"chunk_elements": 1024, "overlap": True, "max_backlog": 2}
    with AdamW(parameters, directory, memory="1MiB", **VALUES, **options) as optimizer:
        for step in range(_STEPS):
            gradients = [torch.randn(one.shape, generator=made).to(one.dtype) for one in values]
            optimizer.zero_grad()
            turn = order.sample(range(len(values)), len(values))
            seen.add(tuple(turn))
            torch.stack(
                [(parameters[n] * gradients[n]).sum().float() for n in turn]
            ).sum().backward()
            for parameter, gradient in zip(stock.model, gradients, strict=True):
                parameter.grad = gradient
            with warnings.catch_warnings(action="error"):  # no chunk is updated twice
                optimizer.step()
            stock.step()
            for ours, theirs in zip(parameters, stock.model, strict=True):
                assert torch.equal(ours, theirs), step
            if step % 100 == 99:
                for one in (optimizer, stock.optimizer):
                    one.param_groups[0]["lr"] *= 0.7
        assert_equal(snapshot(optimizer), stock.snapshot())
    assert len(seen) == 6
