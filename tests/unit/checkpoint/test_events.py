"""`on_event`: what becomes of each save is told once, in order, from one thread."""

from __future__ import annotations

import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import iobench
from iobench import Checkpointer
from iobench.checkpoint import save as events
from iobench.checkpoint.save import Save
from iobench.errors import TransferError


def _state(value: float = 0.0) -> dict[str, Any]:
    return {"weight": torch.full((64,), value)}


class Told:
    """What a callback was told."""

    def __init__(self) -> None:
        self.events: list[tuple[int, str]] = []
        self.threads: set[str] = set()
        self.saves: list[Save] = []
        self.came = threading.Semaphore(0)

    def __call__(self, save: Save, event: str) -> None:
        self.events.append((save.step, event))
        self.threads.add(threading.current_thread().name)
        self.saves.append(save)
        self.came.release()


def test_saves_that_are_committed(runs: Path) -> None:
    """A direct save has no snapshot; times and transfer are known when it is told."""
    told, persisted = Told(), []

    def on_event(save: Save, event: str) -> None:
        told(save, event)
        if event == "committed":
            persisted.append((save.persist_s, save.durable_s, save.transfer))

    with Checkpointer(runs, writer="buffered", on_event=on_event) as ckpt:
        ckpt.save(_state(), 1)
        ckpt.save_async(_state(), 2)
        ckpt.wait()
        ckpt.save_async(_state(), 3)
    assert told.events == [
        (1, "committed"),
        *((2, "copied"), (2, "committed")),
        *((3, "copied"), (3, "committed")),
    ]
    assert told.threads == {"iobench-events"}
    for persist_s, durable_s, transfer in persisted:
        assert 0 < persist_s <= durable_s
        assert transfer.durable
    assert [thread for thread in threading.enumerate() if thread.name == "iobench-events"] == []


def test_saves_that_are_not(runs: Path, gated: Any) -> None:
    """Dropped, skipped and failed ones."""
    told = Told()
    with Checkpointer(runs, writer=gated, slots=2, on_full="skip", on_event=told) as ckpt:
        ckpt.save_async(_state(), 1)
        gated.begun.acquire()
        ckpt.save_async(_state(), 2)
        ckpt.save_async(_state(), 3)
        gated.let(2)
        ckpt.wait()
        gated.error = TransferError("no room")
        ckpt.save_async(_state(), 4)
        gated.let()
        with pytest.raises(TransferError, match="no room"):
            ckpt.wait()
        gated.let(10)
    assert {event for step, event in told.events if step == 3} == {"dropped"}
    assert [event for step, event in told.events if step == 4] == ["copied", "failed"]
    assert isinstance(told.saves[-1].error, TransferError)
    gated.gate = threading.Semaphore(0)
    told.events.clear()
    with Checkpointer(runs / "b", writer=gated, slots=3, on_full="drop", on_event=told) as ckpt:
        for step in (1, 2, 3):
            ckpt.save_async(_state(), step)
            if step == 1:
                gated.begun.acquire()
        gated.let(10)
    assert [event for step, event in told.events if step == 2] == ["copied", "dropped"]
    assert [event for step, event in told.events if step == 3] == ["copied", "committed"]


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_an_error_of_the_callback_is_a_warning(runs: Path, error: type[BaseException]) -> None:
    """The save is committed, and later events are told, also after sys.exit()."""
    told = Told()

    def on_event(save: Save, event: str) -> None:
        told(save, event)
        raise error(event)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with Checkpointer(runs, writer="buffered", on_event=on_event) as ckpt:
            ckpt.save_async(_state(), 1)
            ckpt.wait()
            ckpt.save(_state(), 2)
        assert ckpt.steps() == [1, 2]
    assert told.events == [(1, "copied"), (1, "committed"), (2, "committed")]
    assert [str(one.message).split(":")[0] for one in said] == [
        "on_event('copied' of step 1) failed",
        "on_event('committed' of step 1) failed",
        "on_event('committed' of step 2) failed",
    ]


def test_a_callback_that_hangs(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves go on; `close` gives it a limited time, and says so."""
    monkeypatch.setattr(events, "_END_S", 0.1)
    left = threading.Event()
    ckpt = Checkpointer(runs, writer="buffered", on_event=lambda _save, _event: left.wait())
    ckpt.save(_state(), 1)
    ckpt.save(_state(), 2)
    with pytest.warns(RuntimeWarning, match="on_event: a call has not returned"):
        ckpt.close()
    left.set()
    assert iobench.load_checkpoint(runs, 2)["weight"][0] == 0
    Checkpointer(runs, writer="buffered").close()  # the lock is free


def test_copies_in_the_remote_tier(runs: Path) -> None:
    """They are told after the commit; those of an earlier process are not."""
    told = Told()
    tiers = [iobench.Remote(str(runs / "remote"))]
    for step in (1, 2):
        with Checkpointer(runs / "local", writer="buffered", tiers=tiers, on_event=told) as ckpt:
            ckpt.save(_state(), step)
            ckpt.wait(until="remote")
    assert told.events == [(s, event) for s in (1, 2) for event in ("committed", "remote")]


def test_a_checkpointer_that_is_forgotten(runs: Path) -> None:
    """Its pending saves are finished and reported, the thread ends, and the directory is free."""
    told = Told()
    ckpt = Checkpointer(runs, writer="buffered", on_event=told)
    ckpt.save_async(_state(), 1)
    forgotten = [ckpt]
    del ckpt
    with pytest.warns(ResourceWarning, match="never closed"):
        forgotten.clear()
    assert told.events == [(1, "copied"), (1, "committed")]
    assert [thread for thread in threading.enumerate() if thread.name == "iobench-events"] == []
    with Checkpointer(runs, writer="buffered") as again:
        assert again.load()["weight"].tolist() == [0] * 64


def test_a_close_in_another_thread(runs: Path) -> None:
    """It waits for the callback like the main thread."""
    told: list[str] = []

    def on_event(_save: Save, event: str) -> None:
        time.sleep(0.2)
        told.append(event)

    ckpt = Checkpointer(runs, writer="buffered", on_event=on_event)
    ckpt.save(_state(), 1)
    thread = threading.Thread(target=ckpt.close)
    thread.start()
    thread.join()
    assert told == ["committed"]
