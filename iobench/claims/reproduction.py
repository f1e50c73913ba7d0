"""Reproduction: judges published claims by our own records."""

from __future__ import annotations

import math
from collections.abc import Sequence

from iobench import workloads
from iobench.bench.judging.comparison import LEAST_SAMPLES, Difference, Finding
from iobench.bench.judging.floors import Floor, floors_beside
from iobench.bench.judging.stats import Interval, Ratio, median, paired_log_ratio
from iobench.bench.judging.verdict import (
    WRONG_BYTES,
    Context,
    VerdictStatus,
    has_wrong_bytes,
    judge,
    with_verification,
)
from iobench.claims.answer import check_one_setting, few_pairs, finding, floor_words, shard
from iobench.claims.claims import Answer, Claim, ClaimFinding, Study
from iobench.claims.trained import judge_training
from iobench.errors import ResultFileError
from iobench.results import Operation, ResultFile
from iobench.units import format_seconds

__all__ = ["judge_records"]


def judge_records(about: Study, results: Sequence[ResultFile]) -> list[ClaimFinding]:
    """Return a finding for each claim that the records answer, from their valid samples only.

    A pair is two samples, or two blocks of training, of the two sides in one repetition. The
    wall-clock figure is from a training record if there is one, else it is an upper bound. Raises
    ResultFileError when no record answers any claim, two records answer the same claim, a record
    has no valid pair, or one side of a claim was measured in several settings.
    """
    found = []
    for claim in about.claims:
        if claim.is_of_files:
            if files := _record(results, claim.workload, trained=False):
                found.append(_judge_files(claim, files))
        elif training := _record(results, claim.workload, trained=True):
            found.append(judge_training(about, claim, training))
        elif claim.measure == "wall clock" and (
            files := _record(results, claim.workload, trained=False)
        ):
            found.append(_judge_files(claim, files))
    if not found:
        wanted = " or ".join(about.workloads)
        raise ResultFileError(f"none of the records is of {wanted}; {about.name} needs one")
    return found


def _record(results: Sequence[ResultFile], workload: str, *, trained: bool) -> ResultFile | None:
    """Return the record of the workload's files, or of its training; ResultFileError for two."""
    found = [
        one
        for one in results
        if one.run.workload.name == workload and (one.run.plan.get("verb") == "train") == trained
    ]
    if len(found) > 1:
        raise ResultFileError(
            f"{', '.join(str(one.path) for one in found)}: {len(found)} records of "
            f"{'training ' if trained else ''}{workload}; a claim is judged by one: give --results "
            "for one of them"
        )
    return found[0] if found else None


def _judge_files(claim: Claim, result: ResultFile) -> ClaimFinding:
    operation: Operation = "restore" if claim.measure == "restore" else "save"
    ours, theirs = claim.ours.writer, claim.theirs.writer
    fast, slow = (_valid(result, writer, operation) for writer in (ours, theirs))
    both = sorted(set(fast) & set(slow))
    if not both:
        raise ResultFileError(
            f"{result.path}: no repetition has a valid {operation} of both {ours} and {theirs}; "
            f"see iobench show {result.path}"
        )
    slow_s = [slow[i] for i in both]
    ratio = paired_log_ratio(slow_s, [fast[i] for i in both])
    floor = floors_beside(result)((operation, None, None), None)
    if claim.measure == "wall clock":
        return _most(claim, result, ratio, slow_s, floor)
    setting = f"{ours} over {theirs}, {shard(result)}"
    return finding(claim, ratio, lambda times: times, setting, floor)


def _valid(result: ResultFile, writer: str, operation: str) -> dict[int, float]:
    """Return seconds by repetition. Raises ResultFileError for several settings or targets."""
    if targets := result.run.environment.storages:
        raise ResultFileError(
            f"{result.path} is of {len(targets)} targets; a claim is judged by a record of one"
        )
    context = Context.of(result.run)
    samples = [
        sample
        for sample in with_verification(result.samples, context)
        if (sample.writer, sample.operation) == (writer, operation)
    ]
    check_one_setting(result, f"{operation}s of {writer}", [one.setting for one in samples])
    failed = [one.why for one in result.failures if one.setting.writer == writer]
    if has_wrong_bytes(samples):
        failed.append(WRONG_BYTES)
    if failed:
        raise ResultFileError(
            f"{result.path}: {writer} has failed ({failed[0]}), and is not judged; "
            f"see iobench show {result.path}"
        )
    return {
        sample.repetition: sample.elapsed_s
        for sample in samples
        if judge(sample, context).status is not VerdictStatus.INVALID
    }


def _most(
    claim: Claim, result: ResultFile, ratio: Ratio, slow_s: Sequence[float], floor: Floor
) -> ClaimFinding:
    """Return the most that the wall clock can shrink: with a save after every step.

    This needs no training. The save times are those at full size by the measured rate, and the step
    time is the workload's published one. The saved share of `n step + save` shrinks with n, the
    steps between two saves. The claim does not publish n.
    """
    step = workloads.load(claim.workload).step_time
    assert step is not None, "claims are about workloads with a published step time"
    workload = result.run.workload
    save_s = median(slow_s) * workload.full_bytes / workload.bytes
    interval = ratio.interval and Interval(
        _share(save_s, ratio.interval.low, step.seconds),
        _share(save_s, ratio.interval.high, step.seconds),
    )
    part = 1 - claim.value * (save_s + step.seconds) / save_s  # of the time of a slow save
    needed = Difference(ratio=ratio, floor=floor.part, than=1 / part if part > 0 else math.inf)
    never = needed.finding is Finding.WORSE
    gained_s = save_s * (1 - 1 / ratio.ratio)
    steps = (gained_s / claim.value - save_s) / step.seconds
    answer = Answer.NO if never else Answer.NOT_COMPARABLE
    if ratio.samples < LEAST_SAMPLES:
        answer, reason = Answer.UNDECIDED, few_pairs(ratio.samples)
    elif never:
        reason = "not even with a save after every step"
    elif steps < 1:
        reason = (
            "computed, not trained; by the median not even a save after every step gains as much"
        )
    else:
        whole = math.floor(steps)  # with one step more the gain is below the claim
        every = "step" if whole == 1 else f"{whole} steps"
        reason = (
            f"computed, not trained; it would hold up to a save every {every}, and the claim's own "
            "interval is not known"
        )
    return ClaimFinding(
        claim=claim,
        ours=_share(save_s, ratio.ratio, step.seconds),
        ci95=interval,
        setting=f"a save of {format_seconds(save_s)} by {claim.theirs.writer} after every step of "
        f"{format_seconds(step.seconds)}{floor_words(floor)}",
        answer=answer,
        reason=reason,
        pairs=ratio.samples,
        bound=True,
    )


def _share(save_s: float, ratio: float, step_s: float) -> float:
    """Return the part of `step + save` that a save `ratio` times as fast saves."""
    return save_s * (1 - 1 / ratio) / (save_s + step_s)
