"""SavingMethod: the costs of a checkpoint with one writer, from a result file or given by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from iobench.bench.judging.verdict import WRONG_BYTES, VerdictStatus, has_wrong_bytes, judged
from iobench.errors import ResultFileError
from iobench.goodput.goodput import Costs
from iobench.results import Failure, ResultFile, Sample, Setting, contender_of
from iobench.results.setting import labels
from iobench.stats.estimates import median
from iobench.units import count_of, format_size

_RESAMPLES = 1000
_SEED = 20260131


@dataclass(frozen=True, kw_only=True)
class SavingMethod:
    """One way to save: its costs by medians, and by `resampled` medians for intervals.

    `resampled` is empty where there are too few samples, 0 or 1, to estimate the spread.
    """

    name: str
    costs: Costs
    resampled: tuple[Costs, ...] = ()
    save_samples: int = 0
    restore_samples: int = 0

    @property
    def mode(self) -> str:
        """`sync` or `async`."""
        return "async" if self.costs.asynchronous else "sync"


@dataclass(frozen=True, kw_only=True)
class _Measured:
    setting: Setting  # of saves
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"save": [], "restore": []})
    invalid: list[str] = field(default_factory=list)  # the first reason of each such sample
    partial: list[str] = field(default_factory=list)  # the part that each partial restore read
    failed: list[str] = field(default_factory=list)  # causes; a failure ends its part in the run


def by_hand(
    *, save_s: float, restore_s: float, blocking_s: float | None = None
) -> list[SavingMethod]:
    """Return a synchronous save of `save_s`, and an asynchronous one that blocks `blocking_s`.

    The asynchronous save takes as long in the background as the synchronous one.
    """
    blocking = (None, blocking_s) if blocking_s is not None else (None,)
    return [SavingMethod(name="given", costs=_costs(save_s, restore_s, one)) for one in blocking]


def from_results(
    result: ResultFile,
    *,
    size_bytes: int | None = None,
    blocking_s: float | None = None,
) -> tuple[list[SavingMethod], list[str]]:
    """Return the settings of the run, fastest save first, and notes on how the times were made.

    A time is `size_bytes` (by default the workload at full size) over the rate of a sample.
    Settings differ in the writer, its options or the axes of a run. With `blocking_s`, asynchronous
    candidates follow; each persists for as long as the save took. Only samples with a VALID verdict
    count. Restores of some tensors and settings that failed do not count.
    Raises ResultFileError when no setting has a save and a restore that count.
    """
    if not result.samples:
        why = "it is of iobench train, and plans are made of the samples of iobench run"
        failures = [f"{one.setting.name}: {one.why}" for one in result.failures]
        no_samples = "; ".join(["it has no samples", *failures])
        raise _nothing(result, why if result.training else no_samples)
    size = result.run.workload.full_bytes if size_bytes is None else size_bytes
    measured = _measured(result, size)
    names = labels(one.setting for one in measured)
    notes = list(_size_notes(result, size))
    found: list[SavingMethod] = []
    for position, (one, name) in enumerate(zip(measured, names, strict=True)):
        if one.failed:
            notes.append(f"{name} is not planned for: {one.failed[0]}")
            continue
        for text, count in Counter(one.invalid).items():
            notes.append(f"{name}: {count_of(count, 'invalid sample')} left out: {text}")
        for part, count in Counter(one.partial).items():
            left = f"{name}: {count_of(count, 'restore')} of {part} left out"
            notes.append(f"{left}: a job restores all tensors")
        save, restore = one.seconds["save"], one.seconds["restore"]
        if not save or not restore:
            missing = " and ".join(what for what, times in one.seconds.items() if not times)
            notes.append(f"{name} is not planned for: no {missing} of it counts")
            continue
        draws = list(zip(_medians(save, position, 0), _medians(restore, position, 1), strict=True))
        pairs = [(median(save), median(restore)), *(draws if len(save) > 1 else [])]
        for blocking in (None, blocking_s) if blocking_s is not None else (None,):
            costs = [_costs(*pair, blocking) for pair in pairs]
            found.append(
                SavingMethod(
                    name=name,
                    costs=costs[0],
                    resampled=tuple(costs[1:]),
                    save_samples=len(save),
                    restore_samples=len(restore),
                )
            )
    if not found:
        raise _nothing(result, "; ".join(notes))
    found.sort(key=lambda one: (one.mode == "async", one.costs.blocking_s + one.costs.persist_s))
    return found, notes


def _nothing(result: ResultFile, why: str) -> ResultFileError:
    return ResultFileError(
        f"{result.path} has nothing to plan with: {why}; see iobench show {result.path}"
    )


def _costs(save_s: float, restore_s: float, blocking_s: float | None) -> Costs:
    if blocking_s is None:
        return Costs(blocking_s=save_s, restore_s=restore_s)
    return Costs(blocking_s=blocking_s, persist_s=save_s, restore_s=restore_s)


def _measured(result: ResultFile, size: int) -> list[_Measured]:
    groups: dict[str, _Measured] = {}
    for sample, verdict in judged(result):
        one = groups.setdefault(contender_of(sample), _nothing_yet(sample))
        if has_wrong_bytes([sample]):
            one.failed.append(WRONG_BYTES)
        if (part := sample.axes.restore_as) is not None:
            one.partial.append(part)
            continue
        if verdict.status is VerdictStatus.INVALID:
            one.invalid.append(verdict.reasons[0].text)
            continue
        seconds = sample.elapsed_s * size / sample.stored_bytes
        one.seconds[sample.operation].append(seconds)
    for failure in result.failures:
        groups.setdefault(contender_of(failure), _nothing_yet(failure)).failed.append(failure.why)
    return list(groups.values())


def _nothing_yet(record: Sample | Failure) -> _Measured:
    return _Measured(setting=record.setting.at(restore_as=None))


def _size_notes(result: ResultFile, size: int) -> Iterator[str]:
    variants = [one.bytes for one in result.run.variants if one.axes.restore_as is None]
    moved = sorted(variants or [result.run.workload.bytes])
    if moved != [size] * len(moved):
        span = " to ".join(dict.fromkeys(map(format_size, (moved[0], moved[-1]))))
        yield f"times are those of {span}, scaled to {format_size(size)} by the measured rate"
    yield (
        f"every node saves {format_size(size)} at the same time and as fast as here: "
        "storage that nodes share is slower"
    )


def _medians(values: Sequence[float], position: int, operation: int) -> list[float]:
    """Draw medians with the distribution of the sign test, each setting with its own seed.

    B of n samples are below the true median, where B has the distribution Binomial(n, 1/2). So a
    drawn median is between two neighbours in order. A bootstrap of 7 samples would hold the true
    median in 88% of all cases, not in 95%.
    """
    rng = np.random.default_rng([_SEED, position, operation])
    ordered = np.sort(np.asarray(values))
    last = ordered.size - 1
    below = rng.binomial(ordered.size, 0.5, size=_RESAMPLES)
    low, high = ordered[np.maximum(below - 1, 0)], ordered[np.minimum(below, last)]
    return [float(one) for one in low + rng.random(_RESAMPLES) * (high - low)]
