"""DrainWaits: waits for the copies that a drain makes in its thread."""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Callable

from iobench.errors import TransferError
from iobench.remote.queue import DrainQueue
from iobench.remote.remote import RemoteTier

__all__ = ["LOOK_AGAIN_S", "DrainWaits"]

LOOK_AGAIN_S = 1.0


class DrainWaits:
    """The waits of a Drain."""

    remote: RemoteTier
    queue: DrainQueue
    failures = 0
    """How many attempts have failed."""
    failure: Exception | None = None
    """Why the last attempt failed; None after a success."""
    _thread: threading.Thread

    def wait(self, seen: int | None = None, within_s: float = math.inf) -> bool:
        """Wait until every checkpoint is durable in the remote tier, or given up.

        Return whether that is so after `within_s` at most. Raises the error of an attempt that
        fails meanwhile, or since there were `seen` failures; the next attempts go on. Raises
        TransferError if the drain was stopped.
        """
        seen = self.failures if seen is None else seen
        left, failure = self._left(lambda: self.failures > seen, within_s)
        if left and failure is not None:
            raise failure
        if left:
            raise TransferError(f"the drain has ended; steps {left} are not in {self.remote}")
        return left is not None

    def finish(self, within_s: float = math.inf) -> bool:
        """Wait like `wait`, but not for a remote tier that fails: a RuntimeWarning says so."""
        left, failure = self._left(lambda: True, within_s)
        if left:
            warnings.warn(
                f"steps {left} are not in {self.remote} yet ({failure}); they are "
                "in the local tier, and the next Checkpointer of it goes on",
                RuntimeWarning,
                stacklevel=3,
            )
        return left is not None

    def _left(
        self, counts: Callable[[], bool], within_s: float
    ) -> tuple[list[int] | None, Exception | None]:
        """Wait until all is copied, or the drain has ended, or has a failure that `counts()`.

        Return the steps that are not in the remote tier, None after `within_s`, and the failure.
        """
        until_s = time.monotonic() + within_s
        with self.queue.changed:
            while self.queue.not_durable() and self._thread.is_alive():
                if self.failure is not None and counts():
                    break
                if time.monotonic() > until_s:
                    return None, None
                self.queue.changed.wait(LOOK_AGAIN_S)
            failure = self.failure if counts() else None
            return sorted(one.step for one in self.queue.not_durable()), failure
