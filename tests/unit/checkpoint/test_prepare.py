"""Slots are allocated one at a time, by the first saves or ahead of them by `prepare`."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_device import FakeDevice
from support.forked import in_child

from iobench import Checkpointer, linux, load_checkpoint
from iobench.checkpoint import persister, slots
from iobench.checkpoint.serialized import Serialized
from iobench.checkpoint.slots import SlotPool
from iobench.units import MIB
from iobench.writers.blocks.pages import HUGE_PAGE
from iobench.writers.image import Bytes

_SOON_S = 60
_STATE = {"w": torch.arange(3 * MIB // 4, dtype=torch.int32), "step": 1}


class _Pages:
    """Counts the calls that make pages, and holds up those of `prepare` while it is closed."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.begun, self.gate = threading.Event(), threading.Event()
        self.gate.set()
        self.error: OSError | None = None
        self._populate = linux.populate

    def __call__(self, address: int, length: int) -> None:
        who = threading.current_thread().name
        who = "prepare" if who == "iobench-prepare" else "save"
        self.calls[who] = self.calls.get(who, 0) + 1
        if who == "prepare":
            self.begun.set()
            assert self.gate.wait(_SOON_S)
        if self.error:
            raise self.error
        self._populate(address, length)


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Pages]:
    made = _Pages()
    monkeypatch.setattr(linux, "populate", made)
    yield made
    made.gate.set()


@pytest.fixture
def ckpt(runs: Path) -> Iterator[Checkpointer]:
    with Checkpointer(runs, writer="buffered", slots=2) as made:
        yield made


def _pool(ckpt: Checkpointer) -> SlotPool:
    return ckpt._persister.pool


def _loaded(ckpt: Checkpointer, state: dict[str, Any]) -> bool:
    loaded = ckpt.load()
    return torch.equal(loaded["w"], state["w"]) and loaded["step"] == state["step"]


class _Gpu(FakeDevice):
    """The trainer's GPU. It records the threads that pin memory which was not pinned before."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def pin(self, memory: Bytes) -> str | None:
        if not self.is_pinned(memory):
            self.made.append(threading.current_thread().name)
        return super().pin(memory)


def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> _Gpu:
    """Every state has CUDA tensors, as far as slots are concerned; the trainer uses this GPU."""
    fake = _Gpu()
    for module in (slots, persister):
        monkeypatch.setattr(module, "cuda_device", lambda _: fake)
    monkeypatch.setattr(Serialized, "on_cpu", False)
    return fake


def test_a_slot_is_made_when_a_save_needs_it(ckpt: Checkpointer, pages: _Pages) -> None:
    """The first save makes one slot and says what it took; the next ones use it again."""
    for step in range(3):
        save = ckpt.save_async(_STATE, step)
        assert (save.pages_s > 0) == (step == 0)
        ckpt.wait()
        sizes = sorted(len(slot.memory) for slot in _pool(ckpt)._free)
        assert sizes == [0, save.size_bytes + -save.size_bytes % linux.PAGE]
    assert pages.calls == {"save": 1}
    assert _loaded(ckpt, _STATE)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("lazy", [False, True])
def test_prepared(
    lazy: bool, gpu: bool, runs: Path, pages: _Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `prepare` no save makes pages, whichever slot it gets. Memory for a GPU is pinned too,
    by the thread, for the device of the trainer; then no save pins."""
    device = _on_a_gpu(monkeypatch) if gpu else None
    with Checkpointer(runs, writer="buffered", slots=2, lazy=lazy) as ckpt:
        ckpt.prepare(_STATE, wait=True)
        assert pages.calls == {"prepare": 2 * 2}  # 3 MiB and a header: two huge pages each
        ckpt.prepare(_STATE, wait=True)
        saves = []
        for step in range(3):
            saves.append(ckpt.save_async(_STATE, step))
            ckpt.before_optimizer_step()
        assert pages.calls == {"prepare": 4}
        assert [save.pages_s for save in saves] == [0, 0, 0]
        assert device is None or device.made == ["iobench-prepare"] * 2
        assert _loaded(ckpt, _STATE)


@pytest.mark.parametrize("gpu", [False, True])
def test_a_save_while_it_prepares(
    gpu: bool, runs: Path, pages: _Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save makes the pages itself, and pins its own slot; what `prepare` does to the slot later
    changes no byte."""
    device = _on_a_gpu(monkeypatch) if gpu else None
    with Checkpointer(runs, writer="buffered", slots=2) as ckpt:
        pages.gate.clear()
        ckpt.prepare(_STATE)
        assert pages.begun.wait(_SOON_S)
        save = ckpt.save_async(_STATE, 1)
        assert gpu or save.pages_s > 0
        assert device is None or device.made == ["MainThread"]
        pages.gate.set()
        ckpt._persister.prepare(1, wait=True)
        assert _loaded(ckpt, _STATE)


def test_closed_while_it_prepares(
    runs: Path, pages: _Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`close` ends it after one more page, with no memory and no thread left."""
    free = SlotPool.free

    def freed(pool: SlotPool) -> None:
        free(pool)
        pages.gate.set()

    monkeypatch.setattr(SlotPool, "free", freed)
    pages.gate.clear()
    ckpt = Checkpointer(runs, writer="buffered", slots=2)
    ckpt.prepare({"w": torch.zeros(4 * HUGE_PAGE, dtype=torch.uint8)})
    assert pages.begun.wait(_SOON_S)
    ckpt.close()
    assert pages.calls == {"prepare": 1}
    assert _pool(ckpt).size_bytes == 0
    assert "iobench-prepare" not in {thread.name for thread in threading.enumerate()}
    with Checkpointer(runs, writer="buffered") as again:
        again.save(_STATE, 1)


@pytest.mark.parametrize("wait", [False, True])
def test_no_memory(wait: bool, ckpt: Checkpointer, pages: _Pages) -> None:
    """`prepare` raises the error if it waits, else the next call does; then saves work again."""
    pages.error = OSError(errno.ENOMEM, "no memory")

    def prepare_and_save() -> None:
        ckpt.prepare(_STATE, wait=wait)
        ckpt._persister._preparing.drain()
        ckpt.save_async(_STATE, 1)

    with pytest.raises(OSError, match="no memory") as caught:
        prepare_and_save()
    assert not ckpt.saves
    assert caught.value.__notes__[0] == "in the background, while the memory of a slot was prepared"
    pages.error = None
    ckpt.save_async(_STATE, 1)
    assert _loaded(ckpt, _STATE)


def test_a_kernel_that_makes_no_pages(ckpt: Checkpointer, pages: _Pages) -> None:
    """Before Linux 5.14 the copy makes them by its accesses."""
    pages.error = OSError(errno.EINVAL, "unknown advice")
    ckpt.prepare(_STATE, wait=True)
    ckpt.save_async(_STATE, 1)
    assert _loaded(ckpt, _STATE)


def test_a_child_is_forked_while_it_prepares(ckpt: Checkpointer, pages: _Pages) -> None:
    """The child's exit waits for nothing, and the parent goes on."""
    pages.gate.clear()
    ckpt.prepare(_STATE)
    assert pages.begun.wait(_SOON_S)

    def use() -> None:
        ckpt._persister.free()
        ckpt.close()
        assert not _pool(ckpt).size_bytes

    in_child(use)
    pages.gate.set()
    ckpt.save_async(_STATE, 1)
    assert _loaded(ckpt, _STATE)


_SCRIPT = """
import sys, torch
from iobench import Checkpointer
told = lambda save, event: print(save.step, event, flush=True)
ckpt = Checkpointer(sys.argv[1], writer="buffered", on_event=told)
state = {"w": torch.ones(1 << 20)}
ckpt.prepare(state)
ckpt.save_async(state, 1)
ckpt.prepare({"w": torch.ones(32 << 20)})
"""


@pytest.mark.slow
def test_the_interpreter_ends_while_it_prepares(runs: Path) -> None:
    """Without `close`: the save is finished and reported; the exit is that of any other script."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(runs)],
        capture_output=True,
        timeout=_SOON_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == b"1 copied\n1 committed\n"
    assert load_checkpoint(runs)["w"].sum() == 1 << 20
