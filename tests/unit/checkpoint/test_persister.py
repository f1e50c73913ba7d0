"""Persister: after any interrupt, in a forked child and in a signal handler no slot is lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from types import FrameType

import pytest
import torch
from support.every_bytecode import SOON_S, Boom, Place, Tracer, at_every_place, within
from support.forked import in_child

from iobench import Checkpointer
from iobench.checkpoint import persister as module
from iobench.checkpoint import slots
from iobench.checkpoint.persister import Persister, Snapshot
from iobench.checkpoint.save import Save
from iobench.checkpoint.slots import SlotPool
from iobench.integrations.background import BackgroundFiles
from iobench.writers.blocks import channel, interpreter_end
from iobench.writers.blocks.channel import Lease, OnFull
from iobench.writers.buffered import BufferedWriter


class _Trainer:
    """Saves one byte per step."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.persister: Persister[int] = Persister(SlotPool(2), self._persist)
        self.saves: list[Save] = []

    def _persist(self, snapshot: Snapshot[int]) -> None:
        assert snapshot.memory[0] == snapshot.content
        snapshot.save.status = "writing"
        self.written.append(snapshot.content)
        snapshot.save.status = "committed"

    def save(self, step: int, on_full: OnFull = "wait") -> None:
        save = Save(step=step, status="copying", created_s=0, size_bytes=1)
        self.saves.append(save)
        lease = Lease(Snapshot(save=save, content=step))
        try:
            assert self.persister.take(lease, pinned=False, on_full=on_full)
            lease.item.memory[0] = step
            self.persister.submit(lease)
        except BaseException as error:
            save.fail(error)
            self.persister.give(lease)
            raise

    def finish(self) -> None:
        self.persister.wait()
        self.persister.raise_failure()

    def train(self) -> None:
        self.persister.prepare(1, wait=False)
        for step in range(4):
            self.save(step, "drop" if step % 2 else "wait")
        self.finish()

    def check(self, place: Place | None) -> None:
        """The persister is idle; both slots can be taken and written."""
        self.persister.wait()
        with suppress(Boom):
            self.persister.prepare(1, wait=True)  # the interrupted one may still go on
        with suppress(Boom):
            self.persister.raise_failure()
        self.train()
        assert self.written[-1] == 3
        ended = {"committed", "dropped", "failed"}
        if place and place[0].co_name == "_release":  # it did not come to set the status
            ended.add("waiting")
        assert {save.status for save in self.saves} <= ended
        called: list[int] = []
        self.persister.when_idle(lambda: called.append(1))
        assert called == [1]
        assert len(self.persister.pool._free) <= 2
        self.persister.free()
        assert not any(len(slot.memory) for slot in self.persister.pool._free)


def _interrupted(where: str, place: Place | None) -> Tracer:
    trainer, tracer = _Trainer(), Tracer([module.__file__, slots.__file__], place)
    raised = tracer.run(trainer.train, in_threads=where == "worker")
    assert raised is None or isinstance(raised, Boom)
    within(SOON_S, lambda: trainer.check(place))
    return tracer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in `__del__`
@pytest.mark.parametrize("where", ["trainer", "worker"])
def test_an_exception_at_every_bytecode(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any place: every save ends, and both slots are free for the next ones."""
    monkeypatch.setattr(channel, "_LOOK_AGAIN_S", 0.005)
    monkeypatch.setattr("iobench.linux.yield_to_others", lambda _: None)
    at_every_place(lambda place: _interrupted(where, place), least=50)


def test_a_forked_child(tmp_path: Path) -> None:
    """A child that is forked while the parent writes saves its own files, and takes no slot."""
    begun, go_on = threading.Event(), threading.Event()

    class Gated(BufferedWriter):
        def write(self, *arguments: object, **options: object) -> object:
            begun.set()
            assert go_on.wait(SOON_S)
            return super().write(*arguments, **options)

    files = BackgroundFiles(Gated(), slots=1)
    save = files.save({"n": torch.ones(3)}, tmp_path / "parent.pt")
    assert begun.wait(SOON_S)

    def use() -> None:
        go_on.set()
        files.close()
        files.save({"n": torch.ones(3)}, tmp_path / "child.pt")
        files.close()
        assert (tmp_path / "child.pt").exists()

    in_child(use)
    assert not (tmp_path / "parent.pt").exists()
    go_on.set()
    files.close()
    assert save.status == "committed"


@pytest.fixture
def on_signal() -> object:
    """`on_signal(call)` makes the next signal call `call()`, once; an alarm ends a deadlock."""
    before = signal.getsignal(signal.SIGUSR1)

    def set_up(call: Callable[[], object]) -> None:
        calls = [call]

        def handle(number: int, frame: FrameType | None) -> None:
            if calls:
                calls.pop()()

        signal.signal(signal.SIGUSR1, handle)
        signal.alarm(SOON_S)

    yield set_up
    signal.alarm(0)
    signal.signal(signal.SIGUSR1, before)


def test_a_handler_saves_while_a_step_is_claimed(
    runs: Path, on_signal: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes while this thread holds the lock of the ledger."""
    state = {"w": torch.ones(3)}
    pending = Save.on_the_way
    with Checkpointer(runs, writer="buffered", slots=4) as ckpt:
        ckpt.save_async(state, 1)

        def interrupted(save: Save) -> bool:
            signal.raise_signal(signal.SIGUSR1)
            return bool(pending.fget(save))

        on_signal(lambda: ckpt.save_async(state, 3))
        monkeypatch.setattr(Save, "on_the_way", property(interrupted))
        ckpt.save_async(state, 2)
        ckpt.wait()
        assert sorted(save.step for save in ckpt.saves) == [1, 2, 3]
        assert {save.status for save in ckpt.saves} <= {"committed", "dropped"}


def test_a_handler_saves_while_slots_are_allocated(
    on_signal: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes another slot than the one that is being mapped, and both are written."""
    trainer = _Trainer()
    mapped = slots.fresh_pages

    def interrupted(size_bytes: int, *, huge: bool) -> object:
        signal.raise_signal(signal.SIGUSR1)
        return mapped(size_bytes, huge=huge)

    on_signal(lambda: trainer.save(1))
    monkeypatch.setattr(slots, "fresh_pages", interrupted)
    trainer.save(2)
    trainer.finish()
    assert sorted(trainer.written) in ([1, 2], [2])
    assert len({id(slot.memory) for slot in trainer.persister.pool._free}) == 2


def test_a_handler_saves_while_the_end_waits(
    on_signal: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of the interpreter the handler writes its save itself, after the one in flight."""
    trainer = _Trainer()
    persist, go_on = trainer.persister._persist, threading.Event()

    def gated(snapshot: Snapshot[int]) -> None:
        assert go_on.wait(SOON_S)
        persist(snapshot)

    monkeypatch.setattr(trainer.persister, "_persist", gated)
    trainer.save(1)
    monkeypatch.setattr(interpreter_end, "_begun", True)
    drained = trainer.persister._channel._drained

    def interrupted() -> bool:
        signal.raise_signal(signal.SIGUSR1)
        return drained()

    def save() -> None:
        go_on.set()
        trainer.save(2)

    on_signal(save)
    monkeypatch.setattr(trainer.persister._channel, "_drained", interrupted)
    trainer.finish()
    assert trainer.written == [1, 2]


def test_a_save_at_the_end(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread starts that the interpreter does not wait for, as in a late function of atexit: a
    save, also a lazy one, is written on return."""
    monkeypatch.setattr(interpreter_end, "_begun", True)
    with Checkpointer(runs, writer="buffered", lazy=True) as ckpt:
        assert ckpt.save_async({"w": torch.ones(3)}, 1).status == "committed"
    with closing(BackgroundFiles(BufferedWriter())) as files:
        assert files.save({"n": 1}, runs / "1.pt").status == "committed"
