"""The baseline of a run: the contender that the rates of the others are compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from iobench.bench.judging.comparison import compare_paired
from iobench.bench.judging.stats import Ratio
from iobench.results import Operation, Sample

__all__ = ["baseline_samples", "is_contender", "paired_ratio"]


def baseline_samples(
    groups: Mapping[tuple[str, Operation, str | None], Sequence[Sample]],
    baseline: Mapping[str, Any] | None,
    of: Sample,
) -> Sequence[Sample]:
    """Return the baseline's samples of the same operation as `of`; empty where `of` is one of them.

    `baseline` has the contender's `name` and `options`, and the axes of saves that the run had.
    Without a `name` it is a target: the same contender there is the baseline of `of`. It is None
    where there is no baseline.
    """
    if baseline is None:
        return []
    if "name" not in baseline:
        own = {"name": of.writer, "options": dict(of.options), **of.axes.of_saves()}
        baseline = own | {name: value for name, value in baseline.items() if name in own}
    if is_contender(of, baseline):
        return []
    kind = of.operation, of.axes.restore_as
    found = (
        samples
        for samples in groups.values()
        if (samples[0].operation, samples[0].axes.restore_as) == kind
        and is_contender(samples[0], baseline)
    )
    return next(found, [])


def paired_ratio(samples: Sequence[Sample], against: Sequence[Sample]) -> Ratio | None:
    """Return the ratio of `samples` to `against` (see `compare_paired`); None without a pair."""
    difference = compare_paired(samples, against)
    return None if difference is None else difference.ratio


def is_contender(sample: Sample, contender: Mapping[str, Any]) -> bool:
    """Return whether `sample` is of `contender`, in the form of the baseline of a plan's record."""
    return (sample.writer, dict(sample.options)) == (
        contender["name"],
        contender["options"],
    ) and all(contender.get(axis, value) == value for axis, value in sample.axes.of_saves().items())
