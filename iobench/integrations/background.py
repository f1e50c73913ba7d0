"""BackgroundFiles: writes torch files in the background, from copies of the saved state."""

from __future__ import annotations

import io
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from iobench.checkpoint.persister import Persister, Snapshot, end_unclosed
from iobench.checkpoint.save import Save
from iobench.checkpoint.slots import SlotPool
from iobench.checkpoint.snapshot import copy_image
from iobench.errors import OptionError
from iobench.formats import torch_image
from iobench.formats.tensors import flat_tensor
from iobench.formats.torch_image import TorchLayout, crc32_setting
from iobench.units import parse_size
from iobench.writers.base import Writer
from iobench.writers.blocks import interpreter_end
from iobench.writers.blocks.channel import Lease
from iobench.writers.image import Bytes
from iobench.writers.s3_store.target import is_s3

_REMEMBERED = 1000  # length of `saves`


@dataclass(frozen=True, kw_only=True)
class _File:
    """A torch file whose storages are copied to a slot."""

    layout: TorchLayout
    directory: str


class BackgroundFiles:
    """Writes `torch.save` files in the background, in the order of the saves.

    `save` copies the state into one of `slots` pieces of host memory, in the layout of the file,
    and returns. It waits while no slot is free. Every file is written. Use it from one thread.
    `raise_failure`, `wait` and `close` raise errors of the background.
    """

    def __init__(self, writer: Writer, *, slots: int = 2, budget: int | str | None = None) -> None:
        budget_bytes = None if budget is None else parse_size(budget)
        if slots < 1:
            raise OptionError(f"slots={slots}: at least 1")
        self._persist = _Persist(writer=writer)
        self._persister = Persister(SlotPool(slots, budget_bytes), self._persist, pick=None)
        self.saves: deque[Save] = deque(maxlen=_REMEMBERED)
        """The last 1,000 saves with their status, oldest first."""
        self._unclosed = weakref.finalize(self, end_unclosed, os.getpid(), self._persister, _ended)
        self._unclosed.atexit = False
        interpreter_end.at_end(self, BackgroundFiles._at_end)

    def save(self, state: Any, file: str | os.PathLike[str], *, step: int = 0) -> Save:
        """Copy `state`; a thread writes the file of `torch.save(state, file)`.

        On return the state may change; nothing is durable yet. `step` is only recorded in the Save.
        Raises earlier errors of the background before it copies anything. Raises StateError when
        the copy does not fit into memory, and passes on what pickling raises.
        """
        began_s = time.perf_counter()
        self.raise_failure()
        directory, name = os.path.split(absolute(file))
        layout = torch_image.layout(name, state, directory) or _as_torch_writes(name, state)
        save = Save(
            step=step, status="copying", created_s=time.time(), size_bytes=layout.size_bytes
        )
        file_to_write = _File(layout=replace(layout, storages={}), directory=directory)
        lease = Lease(Snapshot(save=save, content=file_to_write))
        try:
            self._persister.take(lease, pinned="cuda" in layout.devices)
            save.pages_s = _copy(layout, lease.item.memory)
            self.saves.append(save)
            self._persister.submit(lease)
        except BaseException as error:
            save.fail(error)
            self._persister.give(lease)
            raise
        save.stall_s = time.perf_counter() - began_s
        return save

    def afterwards(self, action: Callable[[], None]) -> None:
        """Call `action` after every earlier save is durable; at once, if they are durable now.

        `action` is not called when a pending save fails, or when the last save failed. An error
        that `action` raises in the background is reported like a failed save.
        """
        saves = list(self.saves)
        earlier = [save for save in saves if save.on_the_way] or saves[-1:]
        self.raise_failure()
        with self._persist.lock:
            self._persist.actions.append((earlier, action))
        self._persist.act()

    def raise_failure(self) -> None:
        """Raise the errors of the background since the last call."""
        self._persister.raise_failure()

    def wait(self) -> None:
        self._persister.wait()
        self.raise_failure()

    def close(self) -> None:
        """Wait for every file, free the memory, and raise what failed. `save` works afterwards."""
        self._persister.wait()
        self._persister.free()
        self.raise_failure()

    def _at_end(self) -> None:
        self._persister.wait()
        if self._unclosed.detach():  # not a call: weakref makes none after its own atexit function
            end_unclosed(os.getpid(), self._persister, _ended)


@dataclass(frozen=True, kw_only=True)
class _Persist:
    """Callback of the persister: writes one file and calls the actions that wait for it."""

    writer: Writer
    # Reentrant: a signal handler that saves may run while this thread holds it.
    lock: AbstractContextManager[object] = field(default_factory=threading.RLock)
    actions: list[tuple[list[Save], Callable[[], None]]] = field(default_factory=list)
    """Actions, each with the saves that must be durable before it."""

    def __call__(self, snapshot: Snapshot) -> None:
        save, file, memory = snapshot.save, snapshot.content, snapshot.memory
        save.status = "writing"
        copies = {start: memory[start : start + size] for start, size in file.layout.sizes.items()}
        save.transfer = self.writer.write(file.layout.image(copies), file.directory)
        save.status = "committed"
        self.act()

    def act(self) -> None:
        """Call the actions whose saves are durable. Forget those of which a save has failed."""
        with self.lock:
            ended = [one for one in self.actions if not any(save.on_the_way for save in one[0])]
            for one in ended:
                self.actions.remove(one)
        for saves, action in ended:
            if all(save.status == "committed" for save in saves):
                action()


def absolute(file: str | os.PathLike[str]) -> str:
    """Return the absolute name of `file`, which stays valid when the process changes directory."""
    name = os.fspath(file)
    return name if is_s3(name) else os.path.join(os.getcwd(), name)


def _copy(layout: TorchLayout, memory: Bytes) -> float:
    """Copy the storages to their positions in `memory`. Returns what `copy_image` returns."""
    if layout.devices <= {"cpu"}:
        return copy_image(memory, layout.unchecked(layout.memories()))
    for start, storage in layout.storages.items():
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        flat_tensor(memory[start : start + storage.nbytes()]).copy_(flat)
    return 0.0


def _as_torch_writes(name: str, state: Any) -> TorchLayout:
    """Return the whole file in memory, for a torch version without a layout."""
    buffer = io.BytesIO()
    with crc32_setting(True):
        torch.save(state, buffer)
    return TorchLayout.of_bytes(name, bytearray(buffer.getbuffer()))


def _ended(failure: Exception | None) -> None:
    if failure is not None:
        interpreter_end.lost(
            f"a background save failed, and no later call raised its error: {failure!r}"
        )
