"""The kinds of targets, and the choice of one by its location."""

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
    """Return the target that `location` names, for use by `contenders`.

    Raises UsageError when a contender does not store in targets of that kind.
    """
    for one in contenders:
        one.check_scheme(location)
    if is_s3(location):
        return BucketTarget.of(str(location), contenders)
    return DirectoryTarget(path=Path(location))
