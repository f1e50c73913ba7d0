"""Copies of a state on a GPU into a slot, with a fake device."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.fake_cuda import GpuTensor
from support.fake_device import FakeDevice

from iobench.checkpoint import snapshot
from iobench.checkpoint.aliases import Leaf
from iobench.checkpoint.snapshot import copy_into
from iobench.errors import StateError
from iobench.writers.image import Bytes


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """The GPU of the state's tensors."""
    fake = FakeDevice()
    monkeypatch.setattr(snapshot, "cuda_device", lambda _: fake)
    return fake


def _content(*sources: torch.Tensor, interrupt: bool = False) -> Any:
    """A file of these tensors, one after the other, perhaps with Ctrl-C after them."""
    leaves = {f"w{n}": Leaf.of_tensor(source) for n, source in enumerate(sources)}

    def parts() -> Iterator[tuple[int, Leaf | Bytes]]:
        position = 0
        for leaf in leaves.values():
            yield position, leaf
            position += leaf.size_bytes
        if interrupt:
            raise KeyboardInterrupt

    return SimpleNamespace(on_cpu=False, leaves=lambda: leaves, parts=parts)


def _state() -> list[torch.Tensor]:
    tensors = [torch.arange(1000.0), torch.arange(7), torch.zeros(0), torch.tensor(3.0)]
    return [one.as_subclass(GpuTensor) for one in tensors]


def _bytes(tensors: list[torch.Tensor]) -> bytes:
    return b"".join(one.as_subclass(torch.Tensor).numpy().tobytes() for one in tensors)


def test_copies_have_ended(device: FakeDevice) -> None:
    """On return the bytes are in the slot."""
    memory, state = np.zeros(5000, np.uint8), _state()
    copy_into(memory, _content(*state, torch.arange(5)))
    want = _bytes(state) + torch.arange(5).numpy().tobytes()
    assert memory[: len(want)].tobytes() == want
    assert device.copies == 3


def test_an_interrupted_copy_does_not_reach_the_slot_later(device: FakeDevice) -> None:
    """No copy is in flight: the next snapshot in this slot would get its bytes."""
    memory = np.zeros(5000, np.uint8)
    with pytest.raises(KeyboardInterrupt):
        copy_into(memory, _content(*_state(), interrupt=True))
    assert not device.pending


@pytest.mark.parametrize("kind", ["xpu", "mps", "meta"])
def test_a_tensor_on_another_device(kind: str, device: FakeDevice) -> None:
    """The error names it."""

    class Other(GpuTensor):
        is_cuda, device = False, torch.device(kind)

    state = [*_state(), torch.ones(3).as_subclass(Other)]
    with pytest.raises(StateError, match=f"w4: a tensor on {kind} cannot be saved"):
        copy_into(np.zeros(5000, np.uint8), _content(*state))
    assert not device.pending
