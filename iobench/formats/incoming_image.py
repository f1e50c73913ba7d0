"""IncomingImage: an image whose tensors are made while a writer fills it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from iobench.formats.collector import collector_paused
from iobench.writers.image import FileImage

__all__ = ["IncomingImage"]

_LONGEST_S = 1.0  # with the garbage collector paused, however slow the storage is


class _Steps:
    """Work in steps. Each step yields up to which byte of the file its work belongs."""

    def __init__(self, steps: Iterator[int]) -> None:
        self._steps, self._lock = steps, threading.Lock()
        self._arrived = self._done = 0
        self._paused, self._late_s = ExitStack(), 0.0
        self._failure: Exception | None = None

    def begin(self) -> ExitStack:
        """Pause the collector; return what ends the pause. Steps may be due from now on."""
        self._paused.enter_context(collector_paused())
        self._late_s = time.monotonic() + _LONGEST_S
        return self._paused

    def arrived(self, size_bytes: int) -> None:
        """Work for the bytes that have arrived. Raises nothing: a completion callback calls it."""
        self._arrived += size_bytes
        # Several threads may read: one of them works, and the others go on.
        if self._lock.acquire(blocking=False):
            try:
                if self._failure is None:
                    self._work(None if time.monotonic() > self._late_s else self._arrived)
            except Exception as error:  # noqa: BLE001 -- raised by `finish`
                self._failure = error
            finally:
                self._lock.release()

    def finish(self) -> None:
        """Do the rest. Raises what a step raised, now or before."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._work(None)

    def _work(self, until: int | None) -> None:
        while until is None or self._done < until:
            done = next(self._steps, None)
            if done is None:
                self._paused.close()
                return
            self._done = done


@dataclass(frozen=True, kw_only=True)
class IncomingImage(FileImage):
    """An image with work that does not need its bytes, such as making 100,000 tensors on them.

    The thread that reads does this work between two completions, while the device reads on. A
    thread of its own would hold Python's lock during that time, and nobody would ask the device for
    more (docs/decisions/0060).
    """

    steps: _Steps = field(repr=False, compare=False)

    @classmethod
    def over(cls, image: FileImage, steps: Iterator[int]) -> IncomingImage:
        """Return `image`. `steps` yields after each step up to which byte its work belongs."""
        return cls(path=image.path, segments=image.segments, steps=_Steps(steps))

    def filled(self, start: int, stop: int) -> None:
        self.steps.arrived(stop - start)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Do the work while the body reads, and the rest after it. Raises what a step raises.

        New objects would make the garbage collector look at all others several times. So it is
        paused until the work is done, for a second at most: then all that is left is done at once.
        """
        with self.steps.begin():
            yield
            self.steps.finish()

    def finish(self) -> None:
        """Do all of the work now."""
        with self.steps.begin():
            self.steps.finish()
