"""RemoteList: the checkpoints of the remote tier, asked for in a thread."""

from __future__ import annotations

import os
import threading
import time

from iobench.checkpoint.order import outlines
from iobench.checkpoint.store import CheckpointStore, DirectoryStore
from iobench.errors import TransferError

__all__ = ["RemoteList"]


class RemoteList:
    """One list of the checkpoints of `store`: its steps, and serial numbers where it has them.

    The thread starts at once and is never joined: a server that hangs delays only those who call
    `wait`. After `done` is set, `found` and `failure` do not change.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self.found: dict[int, int | None] = {}
        self.failure: Exception | None = None
        self.done = threading.Event()
        self._store, self._began_s = store, time.monotonic()
        threading.Thread(target=self._ask, name="iobench-list", daemon=True).start()

    def wait(self, within_s: float | None) -> Exception | None:
        """Wait until `within_s` after the start at most; return why there is no answer, or None."""
        left_s = None
        if within_s is not None:
            left_s = max(0.0, self._began_s + within_s - time.monotonic())
        if not self.done.wait(left_s):
            return TransferError(f"no answer within {within_s:g} s")
        return self.failure

    def _ask(self) -> None:
        try:
            self.found = self._listed()
        except Exception as error:  # noqa: BLE001 -- returned by `wait`
            self.failure = error
        finally:
            self.done.set()

    def _listed(self) -> dict[int, int | None]:
        if _is_new(self._store):
            return {}
        found: dict[int, int | None] = dict.fromkeys(self._store.steps())
        found.update(self._store.serials())
        unknown = [step for step, serial in found.items() if serial is None]
        for step, manifest in outlines(self._store, unknown).items():
            found[step] = manifest.serial if manifest else None
        return found


def _is_new(store: CheckpointStore) -> bool:
    """Return whether it is a directory that nothing was copied to yet."""
    return isinstance(store, DirectoryStore) and not os.path.lexists(store.directory)
