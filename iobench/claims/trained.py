"""Claims about training, judged by the blocks of a training record."""

from __future__ import annotations

from iobench.bench.judging.floors import Floor
from iobench.bench.judging.stats import median, paired_log_ratio
from iobench.claims.answer import check_one_setting, finding, shard
from iobench.claims.claims import Claim, ClaimFinding, Side, Study
from iobench.errors import ResultFileError
from iobench.results import ResultFile, TrainBlock
from iobench.units import count_of, format_seconds

__all__ = ["judge_training"]

_SLOWER = 1.25  # a step more than this many times its simulated time is another setting


def judge_training(about: Study, claim: Claim, result: ResultFile) -> ClaimFinding:
    """Return the finding from pairs of blocks of one repetition whose losses are right.

    Raises ResultFileError when there is no such pair, or one side was trained in several settings.
    """
    ours, theirs = (_blocks(result, side) for side in (claim.ours, claim.theirs))
    both = sorted(set(ours) & set(theirs))
    if not both:
        raise ResultFileError(
            f"{result.path}: no repetition has a block of both {claim.ours} and {claim.theirs} "
            f"whose losses are right; see iobench show {result.path}"
        )
    own, others = [ours[i] for i in both], [theirs[i] for i in both]
    if claim.measure == "stall":
        stalls = [(a.stall_s, b.stall_s) for a, b in zip(others, own, strict=True)]
        known = [(a, b) for a, b in stalls if a is not None and b is not None]
        ratio = paired_log_ratio([a for a, _ in known], [b for _, b in known])
    else:
        ratio = paired_log_ratio([b.wall_s for b in others], [b.wall_s for b in own])
    figure = {
        "stall": lambda times: times,
        "wall clock": lambda times: 1 - 1 / times,
        "overhead": lambda times: 1 / times - 1,
    }[claim.measure]
    return finding(
        claim,
        ratio,
        figure,
        _setting(claim, result),
        Floor(),
        incomparable=_incomparable(about, result, own, others),
    )


def _blocks(result: ResultFile, side: Side) -> dict[int, TrainBlock]:
    """Return blocks by repetition. Raises ResultFileError for blocks of several settings."""
    blocks = [block for block in result.training if _side(block) == side]
    check_one_setting(result, f"blocks of {side}", [one.setting for one in blocks])
    return {
        block.repetition: block
        for block in blocks
        if block.losses_equal and block.resumed_equal is not False
    }


def _side(block: TrainBlock) -> Side:
    mode = f"{block.mode}={block.slots}" if block.slots else block.mode
    return Side(writer=block.writer, mode=mode)


def _setting(claim: Claim, result: ResultFile) -> str:
    plan = result.run.plan
    step = "as long as it takes"
    if plan["simulated_s"]:
        scaled = ", scaled like the checkpoint" if plan.get("step_scaled") else ""
        step = f"{format_seconds(plan['simulated_s'])}{scaled}"
    steps = count_of(plan["every"], "step")
    return (
        f"{claim.ours} compared with {claim.theirs}, {shard(result)}, a save every {steps}, "
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
    step_s = median([seconds for block in (*own, *others) for seconds in block.step_s])
    if simulated_s and step_s > _SLOWER * simulated_s:
        return (
            f"a step took {format_seconds(step_s)} and not the {format_seconds(simulated_s)} "
            "simulated; choose a larger --size"
        )
    saves = [save for block in own for save in block.saves]
    durable = sum(save.status == "committed" for save in saves)
    if durable < len(saves):
        return f"only {durable} of {len(saves)} checkpoints became durable"
    return ""
