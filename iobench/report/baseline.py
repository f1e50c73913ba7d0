"""The baseline: the contender of a run that the others' rates are given as ratios to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from iobench.bench.judging.comparison import compare_paired
from iobench.bench.judging.stats import Ratio
from iobench.results import Operation, Sample

__all__ = ["baseline_samples", "paired_ratio"]


def baseline_samples(
    groups: Mapping[tuple[str, Operation, str | None], Sequence[Sample]],
    baseline: Mapping[str, Any] | None,
    of: Sample,
) -> Sequence[Sample]:
    """The baseline's samples of what `of` is a sample of; none where `of` is one of them.

    `baseline` has the contender's `name` and `options`, and the axes of saves that the run had;
    None where there is no baseline.
    """
    if baseline is None or _is(of, baseline):
        return []
    kind = of.operation, of.axes.restore_as
    found = (
        samples
        for samples in groups.values()
        if (samples[0].operation, samples[0].axes.restore_as) == kind and _is(samples[0], baseline)
    )
    return next(found, [])


def paired_ratio(samples: Sequence[Sample], against: Sequence[Sample]) -> Ratio | None:
    """How many times the rate of `against`; see `compare_paired`, which counts twins as one."""
    difference = compare_paired(samples, against)
    return None if difference is None else difference.ratio


def _is(sample: Sample, contender: Mapping[str, Any]) -> bool:
    return (sample.writer, dict(sample.options)) == (
        contender["name"],
        contender["options"],
    ) and all(contender.get(axis, value) == value for axis, value in sample.axes.of_saves().items())
