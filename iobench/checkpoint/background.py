"""BackgroundFiles: torch files written in the background, from copies of what they hold."""

from __future__ import annotations

import io
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from iobench.checkpoint.persister import Persister
from iobench.checkpoint.save import Save
from iobench.checkpoint.slots import Slot, SlotPool
from iobench.checkpoint.snapshot import copy_image
from iobench.errors import OptionError
from iobench.formats import torch_image
from iobench.formats.tensors import flat_tensor
from iobench.formats.torch_layout import TorchLayout
from iobench.formats.torch_settings import crc32_setting
from iobench.writers.base import Writer
from iobench.writers.blocks import interpreter_end
from iobench.writers.image import Bytes
from iobench.writers.s3_store.target import is_s3

__all__ = ["BackgroundFiles", "absolute"]

_REMEMBERED = 1000  # saves that `saves` tells of


@dataclass(frozen=True, kw_only=True)
class _File:
    """A torch file whose storages are in a slot."""

    save: Save
    slot: Slot
    layout: TorchLayout
    directory: str


class BackgroundFiles:
    """Writes `torch.save` files in the background, in the order in which they were saved.

    `save` copies the state into one of `slots` pieces of host memory, laid out as the file will
    be, and returns; with none free it waits. None is dropped. To be used by one thread. What fails
    in the background is raised by `raise_failure`, `wait` and `close`.
    """

    def __init__(self, writer: Writer, *, slots: int = 2, budget_bytes: int | None = None) -> None:
        if slots < 1:
            raise OptionError(f"slots={slots}: at least 1")
        self._pool = SlotPool(slots, budget_bytes)
        self._persist = _Persist(writer=writer)
        self._persister = Persister(self._pool.slots, self._persist, in_order=True)
        self._last: Save | None = None
        self.saves: deque[Save] = deque(maxlen=_REMEMBERED)
        """What became of the last 1,000 files, oldest first."""
        self._unclosed = weakref.finalize(self, _finish_unclosed, os.getpid(), self._persister)
        self._unclosed.atexit = False
        interpreter_end.at_end(self, BackgroundFiles._at_end)

    def save(
        self,
        state: Any,
        file: str | os.PathLike[str],
        *,
        step: int = 0,
        crc: bool = True,
        **options: Any,
    ) -> Save:
        """Take a copy of `state`, to become the file that `torch.save(state, file, **options)` is.

        On return the state may change; nothing is durable yet. `step` is for the Save alone. Raises
        what failed before (nothing is copied then), StateError where the copy does not fit into
        memory, and what pickling raises.
        """
        began_s = time.perf_counter()
        self.raise_failure()
        directory, name = os.path.split(absolute(file))
        layout = torch_image.layout(name, state, directory, crc=crc, **options)
        if layout is None:
            layout = _as_torch_writes(name, state, crc, options)
        save = Save(
            step=step, status="copying", created_s=time.time(), size_bytes=layout.size_bytes
        )
        try:
            slot = self._persister.take_from(
                self._pool, save, pinned="cuda" in layout.devices, on_full="wait"
            )
            assert slot is not None
            _copy(layout, slot.memory)
            held = _File(
                save=save, slot=slot, layout=layout.without_storages(), directory=directory
            )
            self.saves.append(save)
            self._last = save
            self._persister.submit(held)
        except BaseException as error:
            save.fail(error)
            self._persister.give(save)
            raise
        save.stall_s = time.perf_counter() - began_s
        return save

    def afterwards(self, action: Callable[[], None]) -> None:
        """Do `action` once all that was saved before is durable; now, if it is.

        Not at all if one of those that are on the way fails, or the last save did. What `action`
        raises in the background is raised as a failed save is.
        """
        self.raise_failure()
        last = self._last
        with self._persist.lock:
            if self._persist.untold:
                return
            if last is not None and last.on_the_way:
                self._persist.actions.append((last, action))
                return
        if last is None or last.status == "committed":
            action()

    def raise_failure(self) -> None:
        """Raise what went wrong in the background since this was last asked."""
        try:
            self._persister.raise_failure()
        except BaseException:
            self._persist.forget_told()
            raise

    def wait(self) -> None:
        """Wait until every file is durable; raise what failed."""
        self._persister.wait()
        self.raise_failure()

    def close(self) -> None:
        """Wait for every file, give the memory back, and raise what failed. Saving begins anew."""
        self._persister.wait()
        self._pool.free()
        self.raise_failure()

    def _at_end(self) -> None:
        self._persister.wait()
        self._unclosed()


@dataclass(frozen=True, kw_only=True)
class _Persist:
    """Writes one file, and does what waited for it: what the persister does in the background.

    `untold` are the saves that failed and whose failure was not raised yet.
    """

    writer: Writer
    lock: threading.Lock = field(default_factory=threading.Lock)
    actions: list[tuple[Save, Callable[[], None]]] = field(default_factory=list)
    untold: list[Save] = field(default_factory=list)

    def __call__(self, held: _File) -> None:
        try:
            self._write(held)
        except BaseException:
            with self.lock:
                self.untold.append(held.save)
                self.actions.clear()  # all of them came after this file
            raise
        with self.lock:
            held.save.status = "committed"
            due = [action for save, action in self.actions if save is held.save]
            del self.actions[: len(due)]
        for action in due:
            action()

    def forget_told(self) -> None:
        """Failures were raised: forget them, but not a save whose failure is yet to be noted."""
        with self.lock:
            self.untold[:] = [save for save in self.untold if save.error is None]

    def _write(self, held: _File) -> None:
        began_s = time.perf_counter()
        held.save.status = "writing"
        image = held.layout.image_in(held.slot.memory)
        held.save.transfer = self.writer.write(image, held.directory)
        held.save.persist_s = time.perf_counter() - began_s


def absolute(file: str | os.PathLike[str]) -> str:
    """The name of `file` for later, when the process may have changed its directory."""
    name = os.fspath(file)
    return name if is_s3(name) else os.path.join(os.getcwd(), name)


def _copy(layout: TorchLayout, memory: Bytes) -> None:
    """Put the storages into their places in `memory`."""
    if layout.devices <= {"cpu"}:
        copy_image(memory, layout.unchecked(layout.memories()))
        return
    for start, storage in layout.storages.items():
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        flat_tensor(memory[start : start + storage.nbytes()]).copy_(flat)


def _as_torch_writes(name: str, state: Any, crc: bool, options: dict[str, Any]) -> TorchLayout:
    """For a torch whose files cannot be described: the whole file, in memory of its own."""
    buffer = io.BytesIO()
    with crc32_setting(crc):
        torch.save(state, buffer, **options)
    return TorchLayout.of_bytes(name, bytearray(buffer.getbuffer()))


def _finish_unclosed(pid: int, persister: Persister[_File]) -> None:
    """Nobody closed it: what is on the way is finished all the same, and failures are told.

    The garbage collector may call this in any thread: only the main thread waits.
    """
    if os.getpid() != pid:
        return
    if threading.current_thread() is threading.main_thread():
        persister.wait()
    persister.when_idle(lambda: _tell_failure(persister))


def _tell_failure(persister: Persister[_File]) -> None:
    try:
        persister.raise_failure()
    except Exception as error:  # noqa: BLE001 -- nobody is left to raise it to
        interpreter_end.lost(
            f"files were saved in the background and nobody asked what became of them: {error!r}"
        )
