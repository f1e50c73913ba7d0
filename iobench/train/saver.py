"""Saver: takes the checkpoints of one block of training in the mode of its arm, and counts them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from iobench import linux
from iobench.checkpoint.retention import KeepLast
from iobench.checkpoint.save import Save
from iobench.checkpoint.serialized import Serialized
from iobench.checkpointer.checkpointer import Checkpointer
from iobench.errors import transfer_errors
from iobench.peers.base import Peer
from iobench.remote.memory import Memory
from iobench.results import TrainSave
from iobench.train.arm import SLOWER_MEMORY, Arm
from iobench.writers.base import Writer
from iobench.writers.blocks.channel import Channel, Lease
from iobench.writers.blocks.interrupt_safe import uninterrupted
from iobench.writers.local.new_file import sync_directory
from iobench.writers.removal import remove_tree

_SLOWER = "/dev/shm"
"""The slower memory: tmpfs, which every machine has. It is as fast as DRAM."""


class Saver:
    """Takes no checkpoint; a subclass takes them and keeps the last one.

    The caller must close it, also after an error.
    """

    def save(self, state: Any, step: int) -> None:
        """Take a checkpoint. After the return the state may change as the arm's mode allows."""

    def before_update(self) -> None:
        """Wait until the state may change."""

    def wait(self) -> None:
        """Wait until every checkpoint is durable. Raises the error of a failed save."""

    @property
    def persisting(self) -> bool:
        """Whether a checkpoint is in flight to storage."""
        return False

    def saves(self) -> tuple[TrainSave, ...]:
        """Return the result of each save, oldest first."""
        return ()

    def load(self) -> Any:
        """Return the state of the last checkpoint."""
        raise AssertionError("no checkpoint was taken")

    def close(self) -> None:
        """Wait for the saves, and free the memory."""


def saver_for(arm: Arm, directory: Path) -> Saver:
    """Return the saver of `arm`. It creates `directory` for its checkpoints."""
    if arm.by is None:
        return Saver()
    if isinstance(arm.by, Peer):
        return _StockSaver(arm.by, directory, background=arm.mode == "async")
    return _OurSaver(arm, arm.by, directory)


class _OurSaver(Saver):
    """Saves with a Checkpointer, which opens with the first save.

    In modes `memory` and `spill` it has memory tiers: DRAM for `slots` snapshots, in mode `spill`
    with tmpfs for more. Every checkpoint is written and stays, and the first save makes the memory.
    """

    def __init__(self, arm: Arm, writer: Writer, directory: Path) -> None:
        self._arm, self._writer, self._directory = arm, writer, directory
        self._sync = arm.mode == "sync"
        self._opened: Checkpointer | None = None
        self._saves: list[Save] = []  # all saves: a Checkpointer reports the last ones only

    def _open(self, state: Any) -> Checkpointer:
        arm, where, writer = self._arm, self._directory, self._writer
        if not arm.keeps_all:
            return Checkpointer(
                where,
                world="alone",
                writer=writer,
                slots=arm.slots or 1,
                keep=KeepLast(1),
                lazy=arm.mode == "lazy",
                budget=arm.budget_bytes,
            )
        assert arm.slots is not None
        dram = arm.slots * -(-Serialized.of(state).size_bytes // linux.PAGE) * linux.PAGE
        spills = [Memory(SLOWER_MEMORY * dram, path=_SLOWER)] if arm.mode == "spill" else []
        opened = Checkpointer(where, writer=writer, tiers=[Memory(dram), *spills])
        opened.prepare(state, wait=True)
        return opened

    def save(self, state: Any, step: int) -> None:
        if self._opened is None:
            self._opened = self._open(state)
        take = self._opened.save if self._sync else self._opened.save_async
        self._saves.append(take(state, step))

    def before_update(self) -> None:
        if self._opened is not None:
            self._opened.before_optimizer_step()

    def wait(self) -> None:
        if self._opened is not None:
            self._opened.wait()

    @property
    def persisting(self) -> bool:
        return any(one.on_the_way for one in self._saves)

    def saves(self) -> tuple[TrainSave, ...]:
        return tuple(self._reported(one) for one in self._saves)

    def load(self) -> Any:
        assert self._opened is not None, "no checkpoint was taken"
        return self._opened.load()

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def _reported(self, save: Save) -> TrainSave:
        return TrainSave(
            step=save.step,
            status=save.status,
            stall_s=save.stall_s,
            persist_s=None if self._sync else save.persist_s,
            durable_s=save.durable_s,
        )


class _StockSaver(Saver):
    """Saves as the peer does to a temporary path, then fsync, rename, and fsync of the directory.

    In the background a thread of ours ends what the peer began. The next save waits for it.
    """

    def __init__(self, peer: Peer, directory: Path, *, background: bool) -> None:
        directory.mkdir()
        self._peer, self._directory, self._background = peer, directory, background
        self._channel: Channel[tuple[Callable[[], None], int, float]] = Channel(
            lambda: self._channel.serve(self._persist),
            name=peer.name,
            lingers=False,
            daemon=False,
        )
        self._saves: list[TrainSave] = []
        self._state: Any = None

    def save(self, state: Any, step: int) -> None:
        began_s = time.perf_counter()
        self._state = state
        if not self._background:
            self._end(lambda: self._peer.save(state, self._begun()), step)
            self._note(step, time.perf_counter() - began_s, None)
            return
        self.wait()
        ending = self._peer.save_async(state, self._begun())
        stall_s = time.perf_counter() - began_s
        self._channel.submit(Lease((ending, step, stall_s)))

    def wait(self) -> None:
        uninterrupted(lambda: self._channel.drain(despite_failure=True))
        if failure := self._channel.failure:
            self._channel.failure = None
            raise failure

    @property
    def persisting(self) -> bool:
        return not self._channel.idle

    def saves(self) -> tuple[TrainSave, ...]:
        return tuple(self._saves)

    def load(self) -> Any:
        return self._peer.restore(self._file(self._checkpoint(self._saves[-1].step)), self._state)

    def close(self) -> None:
        self.wait()

    def _begun(self) -> str:
        self._temporary.mkdir()
        return self._file(self._temporary)

    @property
    def _temporary(self) -> Path:
        return self._directory / "part"

    def _checkpoint(self, step: int) -> Path:
        return self._directory / f"step-{step}"

    def _file(self, directory: Path) -> str:
        return str(directory / f"state{self._peer.suffix}")

    def _persist(self, begun: tuple[Callable[[], None], int, float]) -> None:
        ending, step, stall_s = begun
        began_s = time.perf_counter()
        self._end(ending, step)
        self._note(step, stall_s, time.perf_counter() - began_s)

    def _end(self, ending: Callable[[], None], step: int) -> None:
        """Make the checkpoint of `step` durable and visible, and remove the one before it."""
        with transfer_errors("writing", self._temporary):
            ending()
            for path in [*self._temporary.rglob("*"), self._temporary]:
                linux.sync_file(path)
            self._temporary.rename(self._checkpoint(step))
        sync_directory(self._directory)
        if self._saves:
            remove_tree(self._checkpoint(self._saves[-1].step))

    def _note(self, step: int, stall_s: float, persist_s: float | None) -> None:
        self._saves.append(
            TrainSave(step=step, status="committed", stall_s=stall_s, persist_s=persist_s)
        )
