"""Saves through a budget that is smaller than the state."""

from __future__ import annotations

import _thread
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.fake_cuda import FakeCuda
from support.fake_device import states_on_a_gpu

from iobench import Checkpointer, Memory, load_checkpoint
from iobench.checkpoint.content import Streamed
from iobench.checkpoint.slots import SlotPool
from iobench.errors import StateError, TransferError
from iobench.remote.memory import MemoryPool, MemoryTier
from iobench.units import KIB, MIB
from iobench.writers.base import Writer
from iobench.writers.blocks import interpreter_end
from iobench.writers.buffered import BufferedWriter
from iobench.writers.config import load_writer
from iobench.writers.image import FileImage
from iobench.writers.local.new_file import NewFile
from iobench.writers.local.posix import pwrite_all
from iobench.writers.transfer import Meter

_BLOCK = 64 * KIB


def _state(seed: int = 0) -> dict[str, Any]:
    """Return a state of 1.3 MiB of all kinds; one tensor is half of it."""
    made = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=made)

    large, shared = rand(40_000, 4), rand(100, 300)
    return {
        "small": {f"{number}": rand(number % 7) for number in range(300)},
        "large": large,
        "turned": rand(200, 150).t(),
        "part": rand(64, 64)[:, 5:40],
        "tied": [shared, shared, shared[10:20]],
        "empty": torch.empty(0, 3),
        "array": np.arange(9_000 + seed),
        "last": rand(50_000),
        "step": seed,
    }


def _change(value: Any) -> None:
    """Change all tensors and arrays in place."""
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            _change(one)
    elif isinstance(value, torch.Tensor):
        value.fill_(-1)
    elif isinstance(value, np.ndarray):
        value.fill(-1)


class Gated(BufferedWriter):
    """Writes 64 KiB at a time. `at` is called before each of the tensors with its offset."""

    def __init__(self, at: Any) -> None:
        super().__init__(block_size=_BLOCK)
        self.at = at

    def _send(self, file: NewFile, image: FileImage, meter: Meter) -> None:
        for start in range(0, image.size_bytes, _BLOCK):
            if image.path.startswith("tensors"):
                self.at(start)
            with image.outgoing(start, min(start + _BLOCK, image.size_bytes), meter) as views:
                pwrite_all(file.fd, views, start)


def _size(state: Any, runs: Path) -> int:
    with Checkpointer(runs / "size", writer="buffered") as ckpt:
        return ckpt.save(state, 0).size_bytes


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[int, bytes]:
    """The files of two states, by a Checkpointer without a budget."""
    runs = tmp_path_factory.mktemp("stored")
    with Checkpointer(runs, writer="buffered") as ckpt:
        for step in (1, 2):
            ckpt.save(_state(step), step)
    return {step: _tensors(runs, step) for step in (1, 2)}


def _tensors(runs: Path, step: int) -> bytes:
    return (runs / f"step-{step}" / "tensors.safetensors").read_bytes()


# Shares of the budget with and without `lazy`: all for one writer, and some for each.
_SOME = [(0, False), (1 / 8, True), (1 / 2, False), (1, True)]
_SHARES = [
    *(("buffered,block_size=64KiB", share, lazy) for share, _ in _SOME for lazy in (False, True)),
    *(("hybrid,block_size=128KiB", *one) for one in _SOME),
    *((writer, *one) for writer in ("odirect", "uncached") for one in _SOME),
]


@pytest.mark.parametrize(
    ("writer", "share", "lazy", "gpu"),
    [
        *((*one, False) for one in _SHARES),
        *((writer, *one, False) for writer in ("hybrid,uring=false", "aiofiles") for one in _SOME),
        *((*one, True) for one in _SHARES if one[1] < 1),
    ],
)
def test_the_bytes(
    writer: str,
    share: float,
    lazy: bool,
    gpu: bool,
    stored: dict[int, bytes],
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are those of a save without a budget, of the moment of the call; those of CUDA tensors
    after the work that the trainer had queued on the GPU."""
    first, device = _state(1), None
    direct = writer.startswith(("odirect", "hybrid"))
    where = tmp_path if direct and not gpu else runs  # O_DIRECT on a disk, where syncs take time
    if gpu:
        kept = first["large"].clone()
        first["large"].zero_()
        device = states_on_a_gpu(monkeypatch)
        device.own.add(lambda: np.copyto(first["large"].numpy(), kept.numpy()))
    budget = int(share * len(stored[1]))
    with Checkpointer(where, writer=writer, budget=budget, lazy=lazy) as ckpt:
        for step, state in ((1, first), (2, _state(2))):
            save = ckpt.save_async(state, step)
            _change(state["array"])
            state["step"] = -1
            if lazy:
                ckpt.before_optimizer_step()
            assert save.streamed == (share < 1)
            _change(state)
            ckpt.wait()
            assert save.status == "committed"
            assert ckpt._persister.pool.size_bytes <= budget + 4096
        ckpt.save(_state(1), 3)
    assert device is None or not device.pending
    assert [_tensors(where, step) for step in (1, 2, 3)] == [stored[n] for n in (1, 2, 1)]
    assert [load_checkpoint(where, step)["step"] for step in (1, 2)] == [1, 2]


def test_cuda_tensors_are_read_after_queued_work(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the writer begins, everything has run that the trainer had queued on the GPU."""
    state = _state()
    size, ran = _size(state, runs), list[bool]()
    device, begun = states_on_a_gpu(monkeypatch), threading.Event()
    seen, copy_rest = list[bool](), Streamed.copy_rest

    def at(_: int) -> None:
        seen.append(bool(ran))
        begun.set()

    def late(streamed: Streamed) -> None:  # it waits for that work too
        assert begun.wait(30)
        copy_rest(streamed)

    monkeypatch.setattr(Streamed, "copy_rest", late)
    device.own.add(lambda: ran.append(True))
    with Checkpointer(runs / "a", writer=Gated(at), budget=size // 2) as ckpt:
        ckpt.save_async(state, 1)
    assert seen[0]


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("lazy", [False, True])
def test_when_the_state_may_change(
    runs: Path, lazy: bool, gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as all but the budget was taken: not earlier, and not when all of it is written."""
    state = _state()
    size = _size(state, runs)
    if gpu:
        states_on_a_gpu(monkeypatch)
    go, may_end = threading.Semaphore(0), threading.Event()
    head = size - size // 2

    def at(start: int) -> None:
        assert go.acquire(timeout=30) if start < head else may_end.wait(30)

    with Checkpointer(runs, writer=Gated(at), budget=size // 2, lazy=lazy) as ckpt:
        if lazy:
            ckpt.save_async(state, 1)
        returned = threading.Event()

        def waits() -> None:
            ckpt.before_optimizer_step() if lazy else ckpt.save_async(state, 1)
            returned.set()

        thread = threading.Thread(target=waits)
        thread.start()
        go.release(-(-head // _BLOCK) - 1)
        assert not returned.wait(0.2)
        go.release()
        assert returned.wait(30)
        assert ckpt.saves[-1].status == "writing"
        _change(state)
        may_end.set()
        thread.join()
    assert load_checkpoint(runs, 1)["large"].min() >= 0


def test_a_writer_that_releases_nothing(runs: Path) -> None:
    """The trainer waits until the file is written: its views may be used until then."""
    state = _state()
    seen = []

    class Views(BufferedWriter):
        def _send(self, file: NewFile, image: FileImage, meter: Meter) -> None:
            views = image.views(0, image.size_bytes)
            pwrite_all(file.fd, views, 0)
            seen.append(bytes(views[0]))

    events: list[str] = []
    with Checkpointer(
        runs,
        writer=Views(),
        budget=_size(state, runs) // 2,
        on_event=lambda _, event: events.append(event),
    ) as ckpt:
        ckpt.save_async(state, 1)
        assert len(seen) == 2
        _change(state)
    assert events == ["committed"]
    assert load_checkpoint(runs, 1)["large"].min() >= 0


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("share", [0.3, 0.8])
def test_a_writer_that_fails(runs: Path, share: float, lazy: bool) -> None:
    """Before the trainer goes on or after: the next call raises it, and the next save works."""
    state, failing = _state(), True

    def at(start: int) -> None:
        if failing and start >= share * size:
            raise TransferError(28, "No space left on device", "file")

    size = _size(state, runs)
    with Checkpointer(runs, writer=Gated(at), slots=1, budget=size // 2, lazy=lazy) as ckpt:
        save = ckpt.save_async(state, 1)
        with pytest.raises(TransferError, match="No space left"):
            ckpt.wait()
        assert save.status == "failed"
        assert ckpt.steps() == []
        failing = False
        ckpt.save_async(state, 2)
        ckpt.wait()
        assert ckpt.steps() == [2]
        assert len(ckpt._persister.pool._free) == 1


@pytest.mark.slow
def test_ctrl_c_while_it_waits(runs: Path, expect_same: Any) -> None:
    """The save fails and stores nothing; its error is raised once, and the next save works."""
    state, interrupts = _state(), True
    size = _size(state, runs)
    go_on = threading.Event()

    def at(start: int) -> None:
        if interrupts and start == _BLOCK:
            _thread.interrupt_main()
            assert go_on.wait(30)

    with Checkpointer(runs, writer=Gated(at), slots=1, budget=size // 4) as ckpt:
        with pytest.raises(KeyboardInterrupt):
            ckpt.save_async(state, 1)
        _change(state)
        interrupts = False
        go_on.set()
        ckpt.wait()
        assert [save.status for save in ckpt.saves] == ["failed"]
        assert ckpt.steps() == []
        other = _state(3)
        ckpt.save_async(other, 2)
        ckpt.wait()
        expect_same(other, ckpt.load(2))


def test_ctrl_c_before_the_write(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save ends as failed, and the step can be saved."""
    state, go = _state(), threading.Event()
    with Checkpointer(runs, writer="buffered", slots=1, budget=_size(state, runs) // 4) as ckpt:
        persist, finish_copy = ckpt._persister._persist, ckpt._saving.finish_copy

        def held(snapshot: Any) -> object:
            assert go.wait(30)
            return persist(snapshot)

        calls = iter((finish_copy, _thread.interrupt_main))

        def interrupted() -> None:
            next(calls)()
            threading.Event().wait(0.01)

        with monkeypatch.context() as patch:
            patch.setattr(ckpt._persister, "_persist", held)
            patch.setattr(ckpt._saving, "finish_copy", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ckpt.save_async(state, 1)
        go.set()
        ckpt.wait()
        assert [save.status for save in ckpt.saves] == ["failed"]
        ckpt.save_async(state, 1)
        ckpt.wait()
        assert ckpt.steps() == [1]


def test_a_lazy_save_changed_too_early(runs: Path) -> None:
    """It is not saved, even if the change was to bytes that are written later."""
    state = _state()
    size, go = _size(state, runs), threading.Event()
    gate = Gated(lambda _: go.wait(30))
    with Checkpointer(runs, writer=gate, budget=size // 2, lazy=True) as ckpt:
        ckpt.save_async(state, 1)
        state["last"].add_(1)
        go.set()
        with pytest.raises(StateError, match=r"last .1 tensors in all. was changed during"):
            ckpt.before_optimizer_step()
        assert ckpt.steps() == []


def test_at_the_end_of_the_interpreter(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread can be started: the one that copies writes all of it."""
    state = _state()
    with Checkpointer(runs, writer="buffered", budget=_size(state, runs) // 3) as ckpt:
        monkeypatch.setattr(interpreter_end, "begun", lambda: True)
        save = ckpt._saving.save_async(state, 1)
        assert save.status == "committed"
        _change(state)
        monkeypatch.undo()
    assert load_checkpoint(runs, 1)["large"].min() >= 0


def test_written_a_second_time() -> None:
    """It is refused once the state may have changed, and possible before."""
    data = np.arange(100, dtype=np.uint8)
    rest, copies = np.zeros(100, dtype=np.uint8), []

    def copy(head: FileImage) -> None:
        copies.append(1)
        head.gather(60, 100, rest[60:])

    streamed = Streamed(60, FileImage.of("f", [data]), copy, lambda: None)
    room = np.zeros(100, dtype=np.uint8)
    for _ in range(2):
        image = streamed.image(FileImage.of("f", [rest]))
        image.gather(30, 100, room[30:])
        assert not streamed.taken.is_set()
        image.hashed()
        assert not streamed.taken.is_set()
    assert [(start, bytes(part)) for start, part in image.parts()] == [
        (0, bytes(range(60))),
        (60, bytes(range(60, 100))),
    ]
    image.gather(0, 30, room)
    assert (room == data).all()
    assert streamed.taken.is_set()
    assert len(copies) == 1
    with pytest.raises(TransferError, match="cannot be written again"):
        streamed.image(FileImage.of("f", [rest])).gather(0, 10, room)


@pytest.mark.parametrize("tiers", [False, True])
def test_slots_for_cuda_tensors_are_pinned(tiers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of their memory, until it is freed. Pages are made of pinned memory: the beginning of a
    slot that a budget has no room for takes none."""
    pinned = FakeCuda(monkeypatch).registered
    pool: SlotPool | MemoryPool = SlotPool(2, MIB, streams=True)
    if tiers:
        pool = MemoryPool([MemoryTier(Memory("4MiB"))])
    pool.grow(3 * MIB)
    slot = pool.take(pinned=True)
    begin = 0 if tiers else 2 * MIB
    assert pinned == {slot.memory.ctypes.data + begin: 3 * MIB - begin}
    pool.give(slot)
    pool.free()
    assert not pinned


def test_slots_of_a_budget() -> None:
    """As many whole ones as it holds, else the end of one or none; never more than the budget."""
    pool = SlotPool(3, 10 * MIB, streams=True)
    taken = []
    for size, count, begin in (
        (3, 3, 0), (4, 2, 0), (10, 1, 0), (12, 1, 2), (80, 1, 70), (11, 1, 1), (2, 3, 0)
    ):  # fmt: skip
        pool.grow(size * MIB)
        assert pool.count == count
        taken = [pool.take(pinned=False) for _ in range(count)]
        assert {(len(one.memory) // MIB, one.begin // MIB) for one in taken} == {(size, begin)}
        assert pool.size_bytes <= 10 * MIB
        for one in taken:
            pool.give(one)
    pool = SlotPool(3, 10 * MIB, streams=True, whole=True)
    for size, count in ((3, 3), (4, 2), (10, 1)):
        pool.grow(size * MIB)
        assert (pool.count, pool.take(pinned=False).held_bytes) == (count, size * MIB)
        pool = SlotPool(3, 10 * MIB, streams=True, whole=True)
    with pytest.raises(StateError, match=r"1 slots need 11\.00 MiB .* the budget is 10\.00 MiB"):
        pool.grow(11 * MIB)


def test_memory(tmp_path: Path) -> None:
    """A save of 384 MiB through 32 MiB takes no more than these and the blocks of the writer."""
    state = {f"{number}": torch.ones(32 * MIB, dtype=torch.uint8) for number in range(12)}
    writer: Writer = load_writer("hybrid,block_size=1MiB")
    with Checkpointer(tmp_path, writer=writer, budget="32MiB") as ckpt:
        ckpt.save_async({"w": torch.ones(10)}, 0)
        ckpt.wait()
        before = _peak()
        save = ckpt.save_async(state, 1)
        ckpt.wait()
        assert save.streamed
        assert _peak() - before < 64 * MIB


def _peak() -> int:
    """Return the peak of this process's memory since the last call, in bytes."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    Path("/proc/self/clear_refs").write_text("5")
    return int(lines["VmHWM"].split()[0]) * KIB
