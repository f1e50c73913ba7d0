"""The suite: the list of all checks, and a function that runs them on one writer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

from iobench.testing import (
    check_bytes,
    check_contract,
    check_durability,
    check_failures,
    check_memory,
    check_reads,
    check_streams,
    check_torch,
)
from iobench.testing.check import Check
from iobench.testing.harness import MakeWriter
from iobench.testing.target import TestTarget

_MODULES: tuple[ModuleType, ...] = (
    check_bytes,
    check_memory,
    check_torch,
    check_reads,
    check_streams,
    check_failures,
    check_contract,
    check_durability,
)


def writer_checks(*, stores: bool = True, large: bool = False) -> list[Check]:
    """Return every check for writers that store (or, with `stores=False`, for those that do not).

    With `large`, return only the checks that move more than 2 GiB; without it, only the others.
    """
    every = [item for module in _MODULES for item in vars(module).values()]
    return [
        item
        for item in every
        if isinstance(item, Check) and item.large == large and (stores or not item.needs_storage)
    ]


def check_writer(make_writer: MakeWriter, directory: str | Path) -> None:
    """Run every check that is not large, each in its own directory below `directory`.

    Raises an ExceptionGroup of the errors, each with the claim of its check as a note.
    """
    checks = writer_checks(stores=make_writer().stores)
    run_checks(checks, make_writer, lambda _: directory)


def run_checks(
    checks: Iterable[Check],
    make_writer: MakeWriter,
    target: Callable[[Check], TestTarget | str | Path],
    then: Callable[[], None] = lambda: None,
) -> None:
    """Run each check with its own target, and `then` after it. Raise the errors of all checks."""
    failures: list[Exception] = []
    for check in checks:
        try:
            check(make_writer, target(check))
            then()
        except Exception as error:  # noqa: BLE001 -- all errors are raised together
            error.add_note(f"{check.name}: {check.claim}")
            failures.append(error)
    if failures:
        names = ", ".join(failure.__notes__[-1].partition(":")[0] for failure in failures)
        raise ExceptionGroup(
            f"{len(failures)} checks of {make_writer()!r} failed: {names}", failures
        )
