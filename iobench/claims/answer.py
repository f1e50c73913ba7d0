"""Answer: the finding of a claim from a ratio and its interval."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from iobench.bench.judging.comparison import LEAST_SAMPLES
from iobench.bench.judging.stats import NO_INTERVAL, Interval, Ratio
from iobench.claims.claims import Answer, Claim, ClaimFinding
from iobench.errors import ResultFileError
from iobench.results import ResultFile
from iobench.results.labels import labels
from iobench.results.setting import Setting
from iobench.units import count_of, format_size

__all__ = ["check_one_setting", "few_pairs", "finding", "shard"]


def finding(
    claim: Claim,
    ratio: Ratio,
    figure: Callable[[float], float],
    setting: str,
    *,
    incomparable: str = "",
) -> ClaimFinding:
    """Return the finding of a claim from the paired `ratio`; `figure` converts to its unit.

    `figure` may be a decreasing function of the ratio. `incomparable` is the reason why the figure
    is not comparable with the claim; empty where it is.
    """
    interval = None
    if ratio.interval:
        interval = Interval(*sorted((figure(ratio.interval.low), figure(ratio.interval.high))))
    answer, reason = _compare(claim, interval)
    if ratio.samples < LEAST_SAMPLES:
        answer, reason = Answer.UNDECIDED, few_pairs(ratio.samples)
    if incomparable:
        answer, reason = Answer.NOT_COMPARABLE, incomparable
    return ClaimFinding(
        claim=claim,
        ours=figure(ratio.ratio),
        interval=interval,
        setting=f"{setting}, {count_of(ratio.samples, 'pair')}",
        answer=answer,
        reason=reason,
        pairs=ratio.samples,
    )


def few_pairs(count: int) -> str:
    """Return why so few pairs leave a claim undecided: `2 pairs, 5 needed`."""
    return f"{count_of(count, 'pair')}, {LEAST_SAMPLES} needed"


def shard(result: ResultFile) -> str:
    """Return the rank and the bytes of a record: `rank 0, 1.00 GiB of 12.55 GiB`."""
    workload = result.run.workload
    full = f" of {format_size(workload.full_bytes)}" if workload.scaled else ""
    return f"rank {workload.rank}, {format_size(workload.bytes)}{full}"


def check_one_setting(result: ResultFile, what: str, measured: Iterable[Setting]) -> None:
    """Raise ResultFileError if `measured`, one side of a claim, differ in options or axes."""
    names = dict.fromkeys(labels(measured))
    if len(names) > 1:
        raise ResultFileError(
            f"{result.path} has {what} in more than one setting: {', '.join(names)}; a claim is "
            "judged by one, as iobench reproduce CLAIM --target DIR measures it"
        )


def _compare(claim: Claim, interval: Interval | None) -> tuple[Answer, str]:
    if interval is None:
        return Answer.UNDECIDED, NO_INTERVAL
    value = claim.value
    holds, fails = interval.low >= value, interval.high < value
    if claim.at_most:
        holds, fails = interval.high <= value, interval.low > value
    if holds:
        return Answer.YES, f"the whole interval {'keeps to' if claim.at_most else 'reaches'} it"
    if fails:
        return Answer.NO, f"the whole interval is {'above' if claim.at_most else 'below'} it"
    return Answer.UNDECIDED, "the claim is within the interval"
