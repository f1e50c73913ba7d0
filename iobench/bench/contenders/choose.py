"""Contenders by name: from the text of `--writer` to the contenders of a run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from iobench import peers
from iobench.bench.axes import Variant
from iobench.bench.contenders.base import Contender, WriterContender
from iobench.bench.contenders.peer import PeerContender
from iobench.bench.targets.base import Location
from iobench.errors import IobenchError, UnknownNameError, UsageError
from iobench.writers import registry

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
        return _on_equal_terms(_distinct(text)), []
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
            if not _among(one, chosen):
                chosen.append(one)
            continue
        why = (error for error in refused.values() if not isinstance(error, UsageError))
        left_out += list(dict.fromkeys(map(str, why)))  # empty if no target is of its kind
    return _on_equal_terms(chosen), left_out


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


def _on_equal_terms(chosen: list[Contender]) -> list[Contender]:
    """Make our writers restore into new memory if peers take part: peers return new tensors."""
    if not any(one.is_peer for one in chosen):
        return chosen
    return [
        WriterContender(one.writer, fresh=True) if isinstance(one, WriterContender) else one
        for one in chosen
    ]


def _distinct(text: str) -> list[Contender]:
    chosen = [_make(name, values) for name, values in registry.split_specs(text)]
    for index, one in enumerate(chosen):
        if _among(one, chosen[:index]):
            raise UsageError(f"--writer {text!r}: {one.name} with the same options twice")
    return chosen


def _among(one: Contender, others: Sequence[Contender]) -> bool:
    return any((other.name, other.options) == (one.name, one.options) for other in others)


def _make(name: str, values: dict[str, str]) -> Contender:
    if name.startswith(peers.PREFIX):
        return PeerContender(peers.make(name.removeprefix(peers.PREFIX), **values))
    return WriterContender(registry.make(name, **values))
