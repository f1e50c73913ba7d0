"""Checks of the conformance suite in groups, one test for each group.

A test for each check would be 5,000 tests more, each with its own overhead. A group runs all its
checks and reports each that fails, with its claim.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from iobench.testing import Check, MakeWriter, TestTarget, writer_checks

GROUPS = ("bytes", "memory", "torch", "reads", "streams", "failures", "contract", "durability")
"""The names of the groups. `iobench.testing.check_<name>` defines the checks of a group."""


def check_groups(
    *, stores: bool = True, groups: Iterable[str] = GROUPS
) -> Mapping[str, tuple[Check, ...]]:
    """Return the checks of each group, for writers that store or (`stores=False`) that do not."""
    every = writer_checks(stores=stores)
    found = {
        name: tuple(one for one in every if one.run.__module__ == f"iobench.testing.check_{name}")
        for name in groups
    }
    return {name: checks for name, checks in found.items() if checks}


def run_checks(
    checks: Iterable[Check],
    make_writer: MakeWriter,
    target: Callable[[Check], TestTarget | Path],
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
