"""The baseline: the contender of a run with which the rates of the others are compared."""

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
    """The baseline's samples of the operation of `of`; empty where `of` is one of them.

    `baseline` has the contender's `name` and `options`, and the axes of saves that the run had;
    None where there is no baseline.
    """
    if baseline is None or is_contender(of, baseline):
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
    """How many times the rate of `against`; `compare_paired` counts the twins of an A/A as one."""
    difference = compare_paired(samples, against)
    return None if difference is None else difference.ratio


def is_contender(sample: Sample, contender: Mapping[str, Any]) -> bool:
    """Whether `sample` is of `contender`, which is given like the baseline of a plan's record."""
    return (sample.writer, dict(sample.options)) == (
        contender["name"],
        contender["options"],
    ) and all(contender.get(axis, value) == value for axis, value in sample.axes.of_saves().items())
