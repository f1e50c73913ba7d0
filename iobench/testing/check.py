"""Check: one claim that every writer must meet, and the function that tests it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from iobench.testing.expect import expect
from iobench.testing.footprint import Footprint
from iobench.testing.harness import MakeWriter, WriterHarness
from iobench.testing.target import Directory, TestTarget

__all__ = ["Check", "check"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One claim. Call it with a factory of the writer and an empty directory or TestTarget."""

    name: str
    claim: str
    """One sentence that is true of every correct writer."""
    run: Callable[[WriterHarness], None]
    needs_storage: bool = True
    """Whether it applies only to writers that store what they write."""
    large: bool = False
    """Whether it moves more than 2 GiB."""

    def __call__(self, make_writer: MakeWriter, target: TestTarget | str | Path) -> None:
        """Test the claim in `target`. Raises AssertionError, or the error of the writer.

        Every check also requires that the writer leaves no descriptor open, no thread running and
        no name in the target except those that were written.
        """
        if isinstance(target, str | Path):
            target = Directory(Path(target) / self.name)
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
    *, needs_storage: bool = True, large: bool = False
) -> Callable[[Callable[[WriterHarness], None]], Check]:
    """Return a decorator that turns a function into a Check; its docstring is the claim."""

    def made(run: Callable[[WriterHarness], None]) -> Check:
        claim = " ".join((run.__doc__ or "").split())
        return Check(
            name=run.__name__, claim=claim, run=run, needs_storage=needs_storage, large=large
        )

    return made
