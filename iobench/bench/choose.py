"""Contenders and targets by name: from the texts of `--writer` and `--target` to those of a run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from iobench import peers
from iobench.bench.axes import Variant
from iobench.bench.contenders.base import Contender, WriterContender
from iobench.bench.contenders.peer import PeerContender
from iobench.bench.targets.base import Location, Target
from iobench.bench.targets.bucket import BucketTarget
from iobench.bench.targets.directory import DirectoryTarget
from iobench.errors import IobenchError, UnknownNameError, UsageError
from iobench.writers import registry
from iobench.writers.s3_store.target import is_s3

_ALL = "all"
_BASELINE = f"{peers.PREFIX}torch-save"
_HARNESS = "null"  # left out of `all`: it stores nothing


def choose(text: str, *targets: Location) -> tuple[list[Contender], list[str]]:
    """Return the contenders of `odirect,threads=4,peer:dcp`; `all` adds those that work somewhere.

    Also return the contenders that `all` leaves out, each as a line with its reason. Raises
    UsageError or a subclass for an invalid text, UnavailableError for a contender that cannot be
    imported.
    """
    parts = [part.strip() for part in text.split(",")]
    if _ALL not in parts:
        return on_equal_terms(_distinct(text)), []
    if any(before == _ALL and "=" in part for before, part in pairwise(parts)):
        raise UsageError(f"--writer {text!r}: all takes no options; name the writer")
    named = ",".join(part for part in parts if part != _ALL)
    chosen = _distinct(named) if named else []
    left_out = []
    names = [*registry.names(), *(f"{peers.PREFIX}{name}" for name in peers.names())]
    for name in names:
        if name == _HARNESS:
            continue
        try:
            one = _make(name, {})
        except UsageError:
            continue
        except IobenchError as error:
            left_out.append(str(error))
            continue
        refused = refusals(one, targets)
        if len(refused) < len(targets):
            if one.label not in [other.label for other in chosen]:
                chosen.append(one)
            continue
        why = (error for error in refused.values() if not isinstance(error, UsageError))
        left_out += list(dict.fromkeys(map(str, why)))  # empty if no target is of its kind
    return on_equal_terms(chosen), left_out


def refusals(one: Contender, targets: Sequence[Location]) -> dict[Location, IobenchError]:
    """Return the targets in which the contender does not work, and why: UsageError for the kind."""
    found: dict[Location, IobenchError] = {}
    for target in targets:
        try:
            one.check_scheme(target)
            one.require(target)
        except IobenchError as error:
            found[target] = error
    return found


def find_baseline(
    text: str | None, chosen: Sequence[Variant], *, alike: bool = False
) -> Variant | None:
    """Return the first variant that matches `--baseline`: its name, and the given options and axes.

    The default is `peer:torch-save` if it takes part. With `alike`, variants of one contender are
    compared with each other, and there is no default. Raises UnknownNameError.
    """
    if alike and text is None:
        return None
    for one in chosen:
        if one.is_meant_by(text or _BASELINE):
            return one
    if text is None:
        return None
    raise UnknownNameError("baseline", text, [one.label for one in chosen])


def on_equal_terms(chosen: Iterable[Contender]) -> list[Contender]:
    """Make our writers restore into new memory if peers take part: peers return new tensors."""
    found = list(chosen)
    fresh = any(one.is_peer for one in found)
    return [
        WriterContender(one.writer, fresh=fresh) if isinstance(one, WriterContender) else one
        for one in found
    ]


def _distinct(text: str) -> list[Contender]:
    chosen = [_make(name, values) for name, values in registry.split_specs(text)]
    for index, one in enumerate(chosen):
        if one.label in [other.label for other in chosen[:index]]:
            raise UsageError(f"--writer {text!r}: {one.name} with the same options twice")
    return chosen


def _make(name: str, values: dict[str, str]) -> Contender:
    if name.startswith(peers.PREFIX):
        return PeerContender(peers.make(name.removeprefix(peers.PREFIX), **values))
    return WriterContender(registry.make(name, **values))


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
) -> tuple[tuple[Target, ...], Mapping[tuple[Contender, str | None], str]]:
    """Return the targets, and why which of `contenders` take no part where, by their locations.

    Writes no checkpoint.

    Raises UsageError for a target that is given twice or that no contender works in, TargetError
    for one that is not writable, and the error of a contender that works in none of them.
    """
    targets = []
    for location in locations:
        those = [one for one in contenders if _takes(one, location)]
        if not those:
            contenders[0].check_scheme(location)
        targets.append(target_of(location, those))
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
