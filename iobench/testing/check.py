"""Check: one claim about every writer, and how to try it on one."""

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
    """One claim. Call it with what makes the writer and an empty directory (or a TestTarget)."""

    name: str
    claim: str
    """One sentence that holds for every writer, or the writer is broken."""
    run: Callable[[WriterHarness], None]
    needs_storage: bool = True
    """Whether it only makes sense for writers that store what they write."""
    large: bool = False
    """Whether it moves more than 2 GiB."""

    def __call__(self, make_writer: MakeWriter, place: TestTarget | str | Path) -> None:
        """Try the claim in `place`; raises AssertionError, or what the writer raised.

        Whatever the claim, the same descriptors are open and the same threads alive afterwards, and
        the place holds no other names than those that were written.
        """
        if isinstance(place, str | Path):
            place = Directory(Path(place) / self.name)
        with Footprint.unchanged():
            rig = WriterHarness(make_writer, place)
            expect(
                rig.stores or not self.needs_storage,
                f"{self.name} is no claim about {rig.writer.name!r}, which stores nothing",
            )
            self.run(rig)
            rig.expect_no_leftovers()
            del rig

    def __str__(self) -> str:
        return self.name


def check(
    *, needs_storage: bool = True, large: bool = False
) -> Callable[[Callable[[WriterHarness], None]], Check]:
    """A decorator that makes a Check of a function: its name, and its docstring as the claim."""

    def made(run: Callable[[WriterHarness], None]) -> Check:
        claim = " ".join((run.__doc__ or "").split())
        return Check(
            name=run.__name__, claim=claim, run=run, needs_storage=needs_storage, large=large
        )

    return made
