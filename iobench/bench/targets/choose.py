"""Kinds of targets: which one a location names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from iobench.bench.contenders.base import Contender
from iobench.bench.targets.base import Location, Target
from iobench.bench.targets.bucket import BucketTarget
from iobench.bench.targets.directory import DirectoryTarget
from iobench.writers.s3_store.target import is_s3

__all__ = ["target_of"]


def target_of(location: Location, contenders: Sequence[Contender]) -> Target:
    """The target that `location` names, as `contenders` will use it.

    Raises UsageError when a contender does not store in targets of that kind.
    """
    for one in contenders:
        one.check_scheme(location)
    if is_s3(location):
        return BucketTarget.of(str(location), contenders)
    return DirectoryTarget(path=Path(location))
