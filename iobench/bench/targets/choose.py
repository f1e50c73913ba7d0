"""The kinds of targets, and the choice of them by their locations."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from iobench.bench.contenders.base import Contender
from iobench.bench.contenders.choose import refusals
from iobench.bench.targets.base import Location, Target
from iobench.bench.targets.bucket import BucketTarget
from iobench.bench.targets.directory import DirectoryTarget
from iobench.errors import IobenchError, UsageError
from iobench.writers.s3_store.target import is_s3

Absent = Mapping[tuple[Contender, str | None], str]
"""The reason why a contender takes no part in one of several targets, by its location."""


def split_targets(text: str) -> tuple[str, ...]:
    """Return the targets between the commas of `text`. An existing directory is one target.

    Raises UsageError for a bare name after a bucket: it is a directory, or the end of a prefix with
    a comma.
    """
    parts = tuple(part.strip() for part in text.split(","))
    if len(parts) == 1 or os.path.isdir(text):
        return (text,)
    if "" in parts:
        raise UsageError(f"--target {text!r}: a target is missing between the commas")
    for before, part in pairwise(parts):
        if is_s3(before) and not is_s3(part) and not part.startswith(("/", ".")):
            raise UsageError(
                f"--target {text}: commas separate targets, and {part!r} after {before} begins "
                f"neither with s3:// nor with / or .; write a directory as ./{part}, and choose a "
                "prefix without a comma"
            )
    return parts


def target_of(location: Location, contenders: Sequence[Contender]) -> Target:
    """Return the target that `location` names, for use by `contenders`.

    Raises UsageError when a contender does not store in targets of that kind.
    """
    for one in contenders:
        one.check_scheme(location)
    if is_s3(location):
        return BucketTarget.of(str(location), contenders)
    return DirectoryTarget(path=Path(location))


def targets_of(
    locations: Sequence[Location], contenders: Sequence[Contender]
) -> tuple[tuple[Target, ...], Absent]:
    """Return the targets, and which of `contenders` take no part where. Writes no checkpoint.

    Raises UsageError for a target that is given twice or that no contender works in, TargetError
    for one that is not writable, and the error of a contender that works in none of them.
    """
    takes = [[one for one in contenders if _takes(one, location)] for location in locations]
    for one in contenders:
        if not any(one in those for those in takes):
            one.check_scheme(locations[0])
    for location, those in zip(locations, takes, strict=True):
        if not those:
            contenders[0].check_scheme(location)
    targets = [target_of(*both) for both in zip(locations, takes, strict=True)]
    names = [target.location for target in targets]
    for position, name in enumerate(names):
        if name in names[:position]:
            raise UsageError(f"--target {locations[position]}: {name} is given twice")
    for target in targets:
        target.check()
    refused = {one: refusals(one, locations) for one in contenders}
    for errors in refused.values():
        if len(errors) == len(locations):
            raise _first(errors.values())
    for location in locations:
        if all(location in errors for errors in refused.values()):
            raise _first(errors[location] for errors in refused.values())
    return tuple(targets), {
        (one, name): str(error) if name in str(error) else f"{name}: {error}"
        for one, errors in refused.items()
        for location, name in zip(locations, names, strict=True)
        if (error := errors.get(location))
    }


def _takes(one: Contender, location: Location) -> bool:
    try:
        one.check_scheme(location)
    except UsageError:
        return False
    return True


def _first(errors: Iterable[IobenchError]) -> IobenchError:
    """Return the first error, but not that of a wrong kind of target where there is another."""
    found = list(errors)
    return next((one for one in found if not isinstance(one, UsageError)), found[0])
