"""SaveEvents: tells a callback of the user what becomes of each save, from one thread."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import warnings
from collections.abc import Callable
from typing import Literal

from iobench.checkpoint.save import Save, Status

__all__ = ["OnEvent", "SaveEvent", "SaveEvents"]

SaveEvent = Literal["copied", "committed", "remote", "dropped", "failed"]
"""What has become of a save; see `Checkpointer`."""

OnEvent = Callable[[Save, SaveEvent], object]

_OF_STATUS: dict[Status, SaveEvent] = {
    "waiting": "copied",
    "committed": "committed",
    "superseded": "dropped",
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
        self._saves: dict[int, Save] = {}
        # daemon: a callback that hangs holds up `close` for 10 s, and not the end of the process.
        self._thread = threading.Thread(
            target=_tell, args=(self._events, on_event), name="iobench-events", daemon=True
        )
        self._thread.start()

    def watch(self, save: Save) -> None:
        """Tell of `save` from now on."""
        while len(self._saves) >= _REMEMBERED:
            del self._saves[next(iter(self._saves))]
        self._saves.pop(save.step, None)
        self._saves[save.step] = save
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
    while (told := events.get()) is not None:
        save, event = told
        del told
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
