"""Answer: the finding of a claim from a ratio and its interval."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from iobench.bench.judging.comparison import LEAST_SAMPLES, Difference, Finding
from iobench.bench.judging.floors import Floor
from iobench.bench.judging.stats import Interval, Ratio
from iobench.claims.claims import Answer, Claim, ClaimFinding
from iobench.errors import ResultFileError
from iobench.results import ResultFile
from iobench.results.labels import labels
from iobench.results.setting import Setting
from iobench.units import count_of, format_size

__all__ = ["check_one_setting", "few_pairs", "finding", "floor_words", "shard"]


def finding(
    claim: Claim,
    ratio: Ratio,
    figure: Callable[[float], float],
    setting: str,
    floor: Floor,
    *,
    incomparable: str = "",
) -> ClaimFinding:
    """Return the finding of a claim from the paired `ratio`, how many times as fast our side is.

    `figure` converts it to the unit of the claim, and may be a decreasing function. `incomparable`
    is the reason why the figure is not comparable with the claim; empty where it is.
    """
    answer, reason = _judge(Difference(ratio=ratio, floor=floor.part, than=claim.ratio))
    if incomparable:
        answer, reason = Answer.NOT_COMPARABLE, incomparable
    return ClaimFinding(
        claim=claim,
        ours=figure(ratio.ratio),
        ci95=ratio.interval and Interval(*sorted(figure(bound) for bound in ratio.interval)),
        setting=f"{setting}, {count_of(ratio.samples, 'pair')}{floor_words(floor)}",
        answer=answer,
        reason=reason,
        pairs=ratio.samples,
    )


def floor_words(floor: Floor) -> str:
    """Return the floor and its record, to be added to a setting; nothing for the convention."""
    return f", noise floor {floor}" if floor.record else ""


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


def _judge(claimed: Difference) -> tuple[Answer, str]:
    """Return the answer by the rule of all comparisons, with the claim in place of a baseline."""
    interval, floor = claimed.ratio.interval, f"{100 * claimed.floor:.3g}%"
    if claimed.ratio.samples < LEAST_SAMPLES:
        return Answer.UNDECIDED, few_pairs(claimed.ratio.samples)
    assert interval is not None, "so many pairs have an interval"
    match claimed.finding:
        case Finding.BETTER:
            return Answer.YES, f"the whole interval keeps it, by more than {floor}"
        case Finding.WORSE:
            return Answer.NO, f"the whole interval misses it, by more than {floor}"
    if claimed.than in interval:
        return Answer.UNDECIDED, "the claim is within the interval"
    return Answer.UNDECIDED, f"the interval ends within {floor} of the claim, which may be noise"
