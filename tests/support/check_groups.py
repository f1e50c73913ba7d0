"""Checks of the conformance suite in groups, one test for each group.

A test for each check would be 5,000 tests more, each with its own overhead. A group runs all its
checks and reports each that fails, with its claim.
"""

from collections.abc import Iterable, Mapping

from iobench.testing import Check, writer_checks

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
