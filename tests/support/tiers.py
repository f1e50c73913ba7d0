"""Checkpoints in tiers, for tests."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from iobench.remote.journal import JOURNAL, DrainEvent, DrainJournal

SIZE = 5_000_000
"""Elements of a state: 20 MB, three blocks of a copy, four parts of an upload."""


def state(step: int, size: int = SIZE) -> dict[str, Any]:
    """Return a state that says which step it is of."""
    return {"w": torch.full((size,), float(step)), "step": step}


def until(condition: Callable[[], bool], *, within_s: float = 60.0) -> None:
    """Wait until `condition()`; fail after `within_s`."""
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.01)


def settled(ckpt: Any) -> bool:
    """Return whether the drain has nothing to do."""
    return not ckpt._tier.drain.queue.pending()


def events(directory: Path, event: str) -> list[DrainEvent]:
    """Return the events of one kind in the journal of `directory`."""
    return [one for one in DrainJournal(directory).read()[0] if one.event == event]


def names(directory: Path) -> set[str]:
    """Return the names in a directory of checkpoints, without the lock and the journal."""
    return {path.name for path in directory.iterdir()} - {".iobench-lock", JOURNAL}


def damage(file: Path) -> None:
    """Change one byte in the middle of a file."""
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        byte = opened.read(1)[0]
        opened.seek(-1, 1)
        opened.write(bytes([byte ^ 0xFF]))
