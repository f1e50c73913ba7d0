"""Reproduction: judges published claims by our own records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from iobench.bench.judging.floors import Floor, floors_beside
from iobench.bench.judging.verdict import WRONG_BYTES, VerdictStatus, has_wrong_bytes, judged
from iobench.claims.claims import Answer, Claim, ClaimFinding, Study
from iobench.errors import ResultFileError
from iobench.results import Operation, ResultFile, TrainBlock
from iobench.results.setting import Setting, labels
from iobench.stats.comparison import LEAST_SAMPLES, Comparison, Finding, compare_pairs, few_pairs
from iobench.stats.estimates import Interval, median
from iobench.units import count_of, format_seconds, format_size


def _finding(
    claim: Claim,
    result: ResultFile,
    what: str,
    ours_s: Mapping[int, float],
    theirs_s: Mapping[int, float],
    setting: str,
    floor: Floor,
    incomparable: str = "",
) -> ClaimFinding:
    """Return the finding from seconds by repetition; `what` is what both must have of one.

    `incomparable` is why the figure is not comparable with the claim; empty where it is.
    """
    found = compare_pairs(theirs_s, ours_s, floor.part)
    if found is None:
        raise ResultFileError(
            f"{result.path}: no repetition has {what}; see iobench show {result.path}"
        )
    ratio, figure = found.ratio, claim.figure
    answer, reason = _judge(replace(found, than=claim.ratio))
    if incomparable:
        answer, reason = Answer.NOT_COMPARABLE, incomparable
    by_record = f", noise floor {floor}" if floor.record else ""
    return ClaimFinding(
        claim=claim,
        ours=figure(ratio.ratio),
        ci95=ratio.interval and Interval(*sorted(map(figure, ratio.interval))),
        setting=f"{setting}, {count_of(ratio.samples, 'pair')}{by_record}",
        answer=answer,
        reason=reason,
        pairs=ratio.samples,
    )


def _shard(result: ResultFile) -> str:
    """Return the rank and the bytes of a record: `rank 0, 1.00 GiB of 12.55 GiB`."""
    workload = result.run.workload
    full = f" of {format_size(workload.full_bytes)}" if workload.scaled else ""
    return f"rank {workload.rank}, {format_size(workload.bytes)}{full}"


def _check_one_setting(result: ResultFile, what: str, measured: Iterable[Setting]) -> None:
    """Raise ResultFileError if `measured`, one side of a claim, differ in options or axes."""
    names = dict.fromkeys(labels(measured))
    if len(names) > 1:
        raise ResultFileError(
            f"{result.path} has {what} in more than one setting: {', '.join(names)}; a claim is "
            "judged by one, as iobench reproduce CLAIM --target DIR measures it"
        )


def _judge(claimed: Comparison) -> tuple[Answer, str]:
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


_SLOWER = 1.25  # a step more than this many times its simulated time is another setting


def _judge_training(about: Study, claim: Claim, result: ResultFile) -> ClaimFinding:
    """Return the finding from pairs of blocks of one repetition whose losses are right."""
    ours, theirs = (_blocks(result, side) for side in (claim.ours, claim.theirs))
    both = sorted(set(ours) & set(theirs))
    ours_s, theirs_s = (_seconds(claim, side, both) for side in (ours, theirs))
    why = _incomparable(about, result, [ours[n] for n in both], [theirs[n] for n in both])
    what = f"a block of both {claim.ours} and {claim.theirs} whose losses are right"
    return _finding(claim, result, what, ours_s, theirs_s, _setting(claim, result), Floor(), why)


def _seconds(
    claim: Claim, blocks: Mapping[int, TrainBlock], numbers: Iterable[int]
) -> dict[int, float]:
    found = {
        n: blocks[n].stall_s if claim.measure == "stall" else blocks[n].wall_s for n in numbers
    }
    return {number: seconds for number, seconds in found.items() if seconds is not None}


def _blocks(result: ResultFile, side: str) -> dict[int, TrainBlock]:
    blocks = [block for block in result.training if f"{block.writer} {block.how}".strip() == side]
    _check_one_setting(result, f"blocks of {side}", [one.setting for one in blocks])
    return {
        block.repetition: block
        for block in blocks
        if block.losses_equal and block.resumed_equal is not False
    }


def _setting(claim: Claim, result: ResultFile) -> str:
    plan = result.run.plan
    step = "as long as it takes"
    if plan["simulated_s"]:
        scaled = ", scaled like the checkpoint" if plan.get("step_scaled") else ""
        step = f"{format_seconds(plan['simulated_s'])}{scaled}"
    steps = count_of(plan["every"], "step")
    return (
        f"{claim.ours} compared with {claim.theirs}, {_shard(result)}, a save every {steps}, "
        f"a step {step}"
    )


def _incomparable(
    about: Study, result: ResultFile, own: list[TrainBlock], others: list[TrainBlock]
) -> str:
    """Return why the blocks are not comparable with the claim; empty when they are."""
    plan = result.run.plan
    asked = plan.get("every_asked", str(plan["every"]))
    if about.interval_claimed and asked != about.every:
        return f"checkpoints every {asked}, and the claim is about every {about.every}"
    simulated_s = plan["simulated_s"]
    steps_s = [seconds for block in (*own, *others) for seconds in block.step_s]
    if simulated_s and steps_s and (step_s := median(steps_s)) > _SLOWER * simulated_s:
        return (
            f"a step took {format_seconds(step_s)} and not the {format_seconds(simulated_s)} "
            "simulated; choose a larger --size"
        )
    saves = [save for block in own for save in block.saves]
    durable = sum(save.status == "committed" for save in saves)
    if durable < len(saves):
        return f"only {durable} of {len(saves)} checkpoints became durable"
    return ""


def judge_records(about: Study, results: Sequence[ResultFile]) -> list[ClaimFinding]:
    """Return a finding for each claim that the records answer, from their valid samples only.

    A pair is two samples, or two blocks of training, of the two sides in one repetition. Raises
    ResultFileError when no record answers any claim, two records answer the same claim, a record
    has no valid pair, or one side of a claim was measured in several settings.
    """
    found = []
    for claim in about.claims:
        if claim.is_of_files:
            if files := _record(results, claim.workload, trained=False):
                found.append(_judge_files(claim, files))
        elif training := _record(results, claim.workload, trained=True):
            found.append(_judge_training(about, claim, training))
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
    ours, theirs = (side.split()[0] for side in (claim.ours, claim.theirs))
    fast, slow = (_valid(result, writer, operation) for writer in (ours, theirs))
    floor = floors_beside(result)((operation, None, None), None)
    what = f"a valid {operation} of both {ours} and {theirs}"
    return _finding(
        claim, result, what, fast, slow, f"{ours} over {theirs}, {_shard(result)}", floor
    )


def _valid(result: ResultFile, writer: str, operation: str) -> dict[int, float]:
    """Return seconds by repetition. Raises ResultFileError for several settings or targets."""
    if targets := result.run.environment.storages:
        raise ResultFileError(
            f"{result.path} is of {len(targets)} targets; a claim is judged by a record of one"
        )
    found = [
        (sample, verdict)
        for sample, verdict in judged(result)
        if (sample.writer, sample.operation) == (writer, operation)
    ]
    _check_one_setting(result, f"{operation}s of {writer}", [one.setting for one, _ in found])
    failed = [one.why for one in result.failures if one.setting.writer == writer]
    if has_wrong_bytes(sample for sample, _ in found):
        failed.append(WRONG_BYTES)
    if failed:
        raise ResultFileError(
            f"{result.path}: {writer} has failed ({failed[0]}), and is not judged; "
            f"see iobench show {result.path}"
        )
    return {
        sample.repetition: sample.elapsed_s
        for sample, verdict in found
        if verdict.status is not VerdictStatus.INVALID
    }
