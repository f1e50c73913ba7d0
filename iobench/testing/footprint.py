"""Footprint: the open descriptors and running threads of this process, to detect leaks."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from iobench.testing.expect import expect
from iobench.writers.local import deferred_free

__all__ = ["Footprint"]


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The number of open descriptors of each file, and the running threads."""

    descriptors: Counter[str]
    threads: frozenset[threading.Thread]

    @classmethod
    def now(cls) -> Self:
        """Return the present footprint of this process."""
        opened: Counter[str] = Counter()
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the descriptor of `listdir` itself
                opened[os.readlink(f"/proc/self/fd/{number}")] += 1
        return cls(descriptors=opened, threads=frozenset(threading.enumerate()))

    @classmethod
    @contextmanager
    def unchanged(cls) -> Iterator[None]:
        """Raise AssertionError when the block leaves descriptors open or threads running."""
        before = cls.now()
        yield
        deferred_free.wait()  # its thread keeps replaced files open for a moment
        opened, running = cls.now()._beyond(before)
        if opened or running:
            gc.collect()  # objects in reference cycles are not leaks
            opened, running = cls.now()._beyond(before)
        expect(not opened, f"left open: {', '.join(sorted(opened))}")
        expect(not running, f"left running: {', '.join(sorted(t.name for t in running))}")

    def _beyond(self, before: Self) -> tuple[Counter[str], frozenset[threading.Thread]]:
        return self.descriptors - before.descriptors, self.threads - before.threads
