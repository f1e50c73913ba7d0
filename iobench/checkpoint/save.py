"""Save: the status and timing of one checkpoint, its copies, and events for a callback."""

from __future__ import annotations

import contextlib
import copy
import os
import queue
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from iobench.writers.transfer import Transfer

CopyState = Literal["volatile", "durable", "waiting", "draining", "verified", "dropped", "failed"]


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A copy of a checkpoint in the tier `tier`: "memory", or the location of local or remote.

    - `volatile`: in memory; it is lost with this process
    - `waiting`, `draining`: not in this tier yet; `eta_s` is when it is expected there, in seconds
      from now, or None when no rate was measured yet
    - `durable`: complete and visible in this tier
    - `verified`: durable, and read back from this tier with correct checksums
    - `dropped`: it is not copied to this tier; a newer one is
    - `failed`: the local files are damaged, so they are not copied

    `durable_at_s` is when this process made it durable in the remote tier, in seconds since the
    epoch.
    """

    tier: str
    state: CopyState
    eta_s: float | None = None
    durable_at_s: float | None = field(default=None, compare=False)


Status = Literal["copying", "waiting", "writing", "committed", "dropped", "skipped", "failed"]


@dataclass(kw_only=True)
class Save:
    """Record of one save. The background updates `status`; `wait` and `result` wait for its end.

    - `copying`: the snapshot is being taken (lazy saves); `waiting`: it is complete and waits for
      its turn to be written
    - `writing`, then `committed`: only `committed` means durable and visible
    - `dropped`: a newer snapshot was written instead; `skipped`: no slot was free
    - `failed`: `error` is a copy, without traceback, of what the Checkpointer raises

    `stall_s` is the time that the trainer waited, in this call and in `before_optimizer_step`.
    `backlog_wait_s` is the part of it in which the save waited for copies to the remote tier.
    `pages_s` is the part of the copy in which pages of host memory were made: in the first save of
    each slot, unless `prepare` has made them.
    `streamed`: the snapshot is larger than the budget, and is copied while it is written.
    `persist_s` is the time from the begin of the write to the commit, and `durable_s` from the call
    to the commit, as this rank knows of it. `serial` is its number among the saves of a run; 0
    where checkpoints are numbered in the order of their commits.
    """

    step: int
    status: Status
    created_s: float
    size_bytes: int = 0
    stall_s: float = 0.0
    backlog_wait_s: float = 0.0
    pages_s: float = 0.0
    streamed: bool = False
    persist_s: float | None = None
    durable_s: float | None = None
    serial: int = 0
    transfer: Transfer | None = None
    error: BaseException | None = None
    called_s: float = field(default_factory=time.perf_counter, repr=False, compare=False)
    written_from_s: float | None = field(default=None, init=False, repr=False, compare=False)
    on_status: Callable[[Save], None] | None = field(
        default=None, init=False, repr=False, compare=False
    )
    tiers: Callable[[Save], list[Copy]] | None = field(default=None, repr=False, compare=False)
    _ended: threading.Event = field(
        default_factory=threading.Event, init=False, repr=False, compare=False
    )

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "status" or "_ended" not in self.__dict__:  # the latter in __init__
            super().__setattr__(name, value)
        elif value != self.status:
            self._become(value)

    def _become(self, status: Status) -> None:
        now_s = time.perf_counter()
        if status == "writing":
            self.written_from_s = now_s
        elif status == "committed" and self.written_from_s is not None:
            self.persist_s, self.durable_s = now_s - self.written_from_s, now_s - self.called_s
        super().__setattr__("status", status)
        if not self.on_the_way:
            self._ended.set()
        if self.on_status is not None:
            self.on_status(self)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the save is committed, dropped, skipped or failed; return whether it is.

        Returns False after `timeout_s` seconds; None: no limit. Raises nothing: `wait` of the
        Checkpointer raises what failed.
        """
        return not self.on_the_way or self._ended.wait(timeout_s)

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """Wait like `wait`; return why the save failed, or None. Raises TimeoutError."""
        if not self.wait(timeout_s):
            raise TimeoutError(f"the save of step {self.step} is {self.status}")
        return self.error if self.status == "failed" else None

    def result(self, timeout_s: float | None = None) -> Self:
        """Wait like `wait`; return this Save. Raises why it failed, and TimeoutError.

        Look at its `status`: a save that is dropped or skipped has not failed.
        """
        error = self.exception(timeout_s)
        if error is not None:
            raise error
        return self

    @property
    def copies(self) -> list[Copy]:
        """Where its copies are now, nearest first; empty for a Checkpointer without `tiers`."""
        return self.tiers(self) if self.tiers else []

    @property
    def on_the_way(self) -> bool:
        """Whether the save is pending: copying, waiting or writing."""
        return self.status in ("copying", "waiting", "writing")

    def fail(self, error: BaseException) -> None:
        """Record `error`. A committed save stays committed: the error came after the commit.

        The traceback is dropped, because its frames keep the saved state in memory.
        """
        try:
            self.error = copy.copy(error)
        except Exception:  # noqa: BLE001 -- copy.copy fails when __init__ takes other than `args`
            self.error = RuntimeError(f"{type(error).__name__}: {error}")
        if self.status != "committed":
            self.status = "failed"


SaveEvent = Literal["copied", "committed", "remote", "dropped", "failed"]
"""What has become of a save; see `Checkpointer`."""

OnEvent = Callable[[Save, SaveEvent], object]

_OF_STATUS: dict[Status, SaveEvent] = {
    "waiting": "copied",
    "committed": "committed",
    "dropped": "dropped",
    "skipped": "dropped",
    "failed": "failed",
}
_REMEMBERED = 1000  # saves whose remote copies may still come
_END_S = 10.0


class SaveEvents:
    """Calls `on_event(save, event)` in a thread of its own, in the order of the events.

    What happens to a save only puts the event into a queue: no save waits for the callback, and an
    error of the callback is a RuntimeWarning. `end` waits until all calls were made.
    """

    def __init__(self, on_event: OnEvent) -> None:
        self._pid = os.getpid()
        # Reentrant, unlike Queue: a signal handler that saves may run in the middle of a `put`.
        self._events: queue.SimpleQueue[tuple[Save, SaveEvent] | None] = queue.SimpleQueue()
        self._saves = OrderedDict[int, Save]()
        # daemon: a callback that hangs holds up `close` for 10 s, and not the end of the process.
        self._thread = threading.Thread(
            target=_tell, args=(self._events, on_event), name="iobench-events", daemon=True
        )
        self._thread.start()

    def watch(self, save: Save) -> None:
        """Tell of `save` from now on."""
        self._saves.pop(save.step, None)
        self._saves[save.step] = save
        while len(self._saves) > _REMEMBERED:  # each step atomic: a signal handler may save too
            self._saves.popitem(last=False)
        save.on_status = self._changed

    def _changed(self, save: Save) -> None:
        event = _OF_STATUS.get(save.status)
        if event is not None and not (event == "copied" and save.streamed):
            self._put(save, event)

    def remote(self, step: int) -> None:
        """Tell that the checkpoint of `step` is durable in the remote tier."""
        save = self._saves.get(step)  # None: of an earlier process
        if save is not None:
            self._put(save, "remote")

    def _put(self, save: Save, event: SaveEvent) -> None:
        if os.getpid() == self._pid:
            self._events.put((save, event))

    def leave(self) -> None:
        """End the thread after the calls of all events so far; wait for nothing."""
        if os.getpid() == self._pid:
            self._events.put(None)

    def end(self) -> None:
        """Wait for the calls of all events so far, 10 s at most, and end the thread.

        A callback that calls this does not wait for itself.
        """
        self.leave()
        if os.getpid() != self._pid or threading.current_thread() is self._thread:
            return
        self._thread.join(_END_S)
        if self._thread.is_alive():
            warnings.warn(
                f"on_event: a call has not returned for {_END_S:.0f} s, and is not waited for",
                RuntimeWarning,
                stacklevel=2,
            )


def _tell(events: queue.SimpleQueue[tuple[Save, SaveEvent] | None], on_event: OnEvent) -> None:
    while (queued := events.get()) is not None:
        save, event = queued
        del queued
        try:
            on_event(save, event)
        except BaseException as error:  # noqa: BLE001 -- the user's, also sys.exit()
            with contextlib.suppress(RuntimeWarning):  # a filter may raise it; no caller is here
                warnings.warn(
                    f"on_event({event!r} of step {save.step}) failed: {error!r}",
                    RuntimeWarning,
                    stacklevel=1,
                )
        del save  # it may be dropped while this thread waits
