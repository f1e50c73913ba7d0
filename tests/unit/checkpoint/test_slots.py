"""Slots: memory that is allocated, reused and freed, and the copies of a state on a GPU into
one."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.fake_cuda import FakeCuda, GpuTensor
from support.fake_device import FakeBytes, FakeDevice

from iobench.checkpoint import slots, snapshot
from iobench.checkpoint.slots import Slot, SlotPool
from iobench.checkpoint.snapshot import copy_into
from iobench.errors import StateError, UnavailableError
from iobench.units import MIB
from iobench.writers.device.cuda import cuda_device
from iobench.writers.image import Bytes, FileImage


def test_memory_that_grows_is_not_held_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The old mapping is freed before the new one is made; after `free` nothing refers to one."""
    slot = Slot()
    slot.hold(4 * MIB, pinned=False)
    owner = weakref.ref(_owner(slot))
    fresh_pages, held = slots.fresh_pages, []

    def note(size_bytes: int, *, huge: bool) -> Bytes:
        held.append(owner())
        return fresh_pages(size_bytes, huge=huge)

    monkeypatch.setattr(slots, "fresh_pages", note)
    slot.hold(5 * MIB, pinned=False)
    assert held == [None]
    owner = weakref.ref(_owner(slot))
    slot.free()
    assert owner() is None
    assert len(slot.memory) == 0


def test_more_than_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused, whatever the machine has, and no memory is taken."""
    left = [5 * MIB]
    monkeypatch.setattr(slots, "available_bytes", lambda: left[0])
    pool = SlotPool(2)
    with pytest.raises(StateError, match=r"need 6.00 MiB of host memory, 5.00 MiB are available"):
        pool.grow(3 * MIB)
    assert pool.size_bytes == 0
    pool.grow(2 * MIB)
    slot = pool.take(pinned=False)
    assert pool.size_bytes == 2 * MIB
    left[0] = MIB
    with pytest.raises(StateError, match=r"one more slot needs 2.00 MiB .* 1.00 MiB are available"):
        pool.take(pinned=False)
    pool.give(slot)
    assert pool.take(pinned=False) is slot


def test_a_lost_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C just after it was taken: its memory is freed, and the pool makes another."""
    pinned = FakeCuda(monkeypatch).registered
    pool = SlotPool(2)
    pool.grow(MIB)
    pool.take(pinned=True)  # no variable refers to it
    assert (pool.size_bytes, len(pinned)) == (0, 0)
    taken = [pool.take(pinned=True) for _ in range(2)]
    assert len(set(taken)) == 2
    assert (pool.size_bytes, len(pinned)) == (2 * MIB, 2)
    for slot in taken:
        pool.give(slot)
    pool.free()
    assert (pool.size_bytes, len(pinned)) == (0, 0)


def test_freed_while_it_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that another thread frees during the call to CUDA does not stay registered."""
    played, slot = FakeCuda(monkeypatch), Slot()
    slot.hold(MIB, pinned=False)
    register = played._register

    def slow(*arguments: int) -> int:
        slot.free()
        return register(*arguments)

    monkeypatch.setattr(played, "_register", slow)
    slot.make_ready(cuda_device(torch.device("cuda:1")))
    assert not played.registered
    assert len(slot.memory) == 0


def test_memory_that_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has CUDA's code and the remedy; the memory is pinned by a later save."""
    played, slot = FakeCuda(monkeypatch), Slot()
    played.refuse = 2
    with pytest.raises(UnavailableError, match=r"failed with CUDA error 2\. .*ulimit -l"):
        slot.hold(MIB, pinned=True)
    played.refuse = 0
    slot.hold(MIB, pinned=True)
    assert len(played.registered) == 1


def _owner(slot: Slot) -> object:
    """The mapping, or the array over it that all views have as their base."""
    base = slot.memory.base
    assert base is not None
    return base


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """The GPU of the state's tensors."""
    fake = FakeDevice()
    monkeypatch.setattr(snapshot, "cuda_device", lambda _: fake)
    return fake


def _content(device: FakeDevice, *sources: torch.Tensor) -> Any:
    """A file of these tensors, one after the other."""
    parts = [
        device.upload(data) if isinstance(one, GpuTensor) else data
        for one in sources
        for data in [np.frombuffer(_bytes([one]), dtype=np.uint8)]
    ]
    names = [f"w{number}" for number in range(len(sources))]
    return SimpleNamespace(
        on_cpu=False, names=names, tensors=sources, image=lambda: FileImage.of_parts("f", parts)
    )


def _state() -> list[torch.Tensor]:
    tensors = [torch.arange(1000.0), torch.arange(7), torch.zeros(0), torch.tensor(3.0)]
    return [one.as_subclass(GpuTensor) for one in tensors]


def _bytes(tensors: list[torch.Tensor]) -> bytes:
    return b"".join(one.as_subclass(torch.Tensor).numpy().tobytes() for one in tensors)


def test_copies_have_ended(device: FakeDevice) -> None:
    """On return the bytes are in the slot. After an interrupt no copy is in flight: the next
    snapshot in this slot would get its bytes."""
    memory, state = np.zeros(5000, np.uint8), _state()
    copy_into(memory, _content(device, *state, torch.arange(5)))
    want = _bytes(state) + torch.arange(5).numpy().tobytes()
    assert memory[: len(want)].tobytes() == want
    assert device.copies == 3

    def interrupted(*_: int) -> Iterator[FakeBytes]:
        yield device.upload(memory[:100])
        assert device.pending
        raise KeyboardInterrupt

    content = _content(device)
    content.image = lambda: SimpleNamespace(size_bytes=200, pieces=interrupted)
    with pytest.raises(KeyboardInterrupt):
        copy_into(memory, content)
    assert not device.pending


@pytest.mark.parametrize("kind", ["xpu", "mps", "meta"])
def test_a_tensor_on_another_device(kind: str, device: FakeDevice) -> None:
    """The error names it."""

    class Other(GpuTensor):
        is_cuda, device = False, torch.device(kind)

    state = [*_state(), torch.ones(3).as_subclass(Other)]
    with pytest.raises(StateError, match=f"w4: a tensor on {kind} cannot be saved"):
        copy_into(np.zeros(5000, np.uint8), _content(device, *state))
    assert not device.pending
