"""Check: one claim that every writer must meet, and the function that tests it.

Footprint: the open descriptors and running threads of this process, to detect leaks.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from iobench.testing.harness import MakeWriter, WriterHarness, expect
from iobench.testing.target import Directory, TestTarget
from iobench.writers.local import deferred_free


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


@dataclass(frozen=True, kw_only=True)
class Check:
    """One claim. Call it with a factory of the writer and an empty directory or TestTarget."""

    name: str
    claim: str
    """One sentence that is true of every correct writer."""
    run: Callable[[WriterHarness], None]
    needs_storage: bool = True
    """Whether it applies only to writers that store what they write."""
    needs_directory: bool = False
    """Whether it looks at files: a target that is not a `Directory` passes it."""
    large: bool = False
    """Whether it moves more than 2 GiB."""

    def __call__(self, make_writer: MakeWriter, target: TestTarget | str | Path) -> None:
        """Test the claim in `target`. Raises AssertionError, or the error of the writer.

        Every check also requires that the writer leaves no descriptor open, no thread running and
        no name in the target except those that were written.
        """
        if isinstance(target, str | Path):
            target = Directory(Path(target) / self.name)
        elif self.needs_directory and not isinstance(target, Directory):
            return
        with Footprint.unchanged():
            harness = WriterHarness(make_writer, target)
            expect(
                harness.stores or not self.needs_storage,
                f"{self.name} does not apply to {harness.writer.name!r}, which stores nothing",
            )
            self.run(harness)
            harness.expect_no_leftovers()
            del harness  # it keeps the writer, and with it descriptors and threads

    def __str__(self) -> str:
        return self.name


def check(
    *, needs_storage: bool = True, needs_directory: bool = False, large: bool = False
) -> Callable[[Callable[[WriterHarness], None]], Check]:
    """Return a decorator that turns a function into a Check; its docstring is the claim."""

    def made(run: Callable[[WriterHarness], None]) -> Check:
        claim = " ".join((run.__doc__ or "").split())
        return Check(
            name=run.__name__,
            claim=claim,
            run=run,
            needs_storage=needs_storage,
            needs_directory=needs_directory,
            large=large,
        )

    return made
