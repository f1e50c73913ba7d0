"""Published claims about checkpoint I/O, and what our own records say of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from iobench import workloads
from iobench.bench.stats import Interval, Ratio, median, paired_log_ratio
from iobench.bench.verdict import Context, Status, judge, with_verification
from iobench.errors import ResultFileError, UnknownNameError
from iobench.results import Operation, ResultFile
from iobench.units import format_seconds, format_size

__all__ = ["CLAIMS", "Answer", "Claim", "Finding", "Study", "judge_records", "study"]


class Answer(StrEnum):
    """Whether a claim holds here."""

    YES = "yes"
    NO = "no"
    UNDECIDED = "undecided"
    NOT_COMPARABLE = "not comparable"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One published figure: a ratio of speeds, or a share of wall-clock time that is saved."""

    text: str
    workload: str
    operation: Operation | None  # None: the wall clock of training
    value: float


@dataclass(frozen=True, kw_only=True)
class Study:
    """Claims of one source, and the two writers that stand for its two sides."""

    name: str
    source: str
    faster: str
    slower: str
    claims: tuple[Claim, ...]

    @property
    def workloads(self) -> tuple[str, ...]:
        """What must be measured, each once."""
        return tuple(dict.fromkeys(claim.workload for claim in self.claims))


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What was measured of a claim: `ours` in the claim's unit, None where there is no such figure.

    `interval` holds 95 %. `setting` says what it is a figure of, `reason` why the answer is given.
    """

    claim: Claim
    ours: float | None
    interval: Interval | None
    setting: str
    answer: Answer
    reason: str


def _hybrid_io() -> Iterator[Claim]:
    for workload, wall in (("llama7b", 0.12), ("gpt5b-nemo", 0.17)):
        yield Claim(text="writes 1.7x", workload=workload, operation="save", value=1.7)
        yield Claim(text="restores 1.6x", workload=workload, operation="restore", value=1.6)
        text = f"wall clock -{100 * wall:.0f} %"
        yield Claim(text=text, workload=workload, operation=None, value=wall)


CLAIMS = {
    "hybrid-io": Study(
        name="hybrid-io",
        source="DDN on Hybrid-IO: per thread, LLaMA2-7B and NeMo GPT-5B",
        faster="hybrid",
        slower="buffered",
        claims=tuple(_hybrid_io()),
    )
}


def study(name: str) -> Study:
    """The study of that name. Raises UnknownNameError."""
    if name not in CLAIMS:
        raise UnknownNameError("claim", name, CLAIMS)
    return CLAIMS[name]


def judge_records(about: Study, results: Sequence[ResultFile]) -> list[Finding]:
    """A finding for each claim whose workload is among `results`, by valid samples only.

    Pairs are samples of the two writers in one repetition. Raises ResultFileError when no record
    is of the study, or one has no pair that counts.
    """
    records = {result.run.workload.name: result for result in results}
    found = [
        _finding(about, claim, records[claim.workload])
        for claim in about.claims
        if claim.workload in records
    ]
    if not found:
        wanted = " or ".join(about.workloads)
        raise ResultFileError(f"none of the records is of {wanted}; {about.name} needs one")
    return found


def _finding(about: Study, claim: Claim, result: ResultFile) -> Finding:
    operation = claim.operation or "save"
    fast, slow = (_valid(result, writer, operation) for writer in (about.faster, about.slower))
    both = sorted(set(fast) & set(slow))
    if not both:
        raise ResultFileError(
            f"{result.path}: no repetition has a valid {operation} of both {about.faster} and "
            f"{about.slower}; see iobench show {result.path}"
        )
    ratio = paired_log_ratio([slow[i] for i in both], [fast[i] for i in both])
    if claim.operation is None:
        return _wall_clock(about, claim, result, ratio, [slow[i] for i in both])
    return Finding(
        claim=claim,
        ours=ratio.ratio,
        interval=ratio.interval,
        setting=_setting(about, result, ratio),
        answer=_compare(ratio.interval, claim.value),
        reason=_why(ratio.interval, claim.value),
    )


def _valid(result: ResultFile, writer: str, operation: Operation) -> dict[int, float]:
    """Seconds by repetition."""
    context = Context.of(result.run)
    return {
        sample.repetition: sample.elapsed_s
        for sample in with_verification(result.samples)
        if (sample.writer, sample.operation) == (writer, operation)
        and judge(sample, context).status is not Status.INVALID
    }


def _compare(interval: Interval | None, value: float) -> Answer:
    if interval is None or (interval.low < value <= interval.high):
        return Answer.UNDECIDED
    return Answer.YES if interval.low >= value else Answer.NO


def _why(interval: Interval | None, value: float) -> str:
    if interval is None:
        return "one pair has no interval"
    if interval.low >= value:
        return "the whole interval reaches the claim"
    if interval.high < value:
        return "the whole interval is below the claim"
    return "the claim lies within the interval"


def _setting(about: Study, result: ResultFile, ratio: Ratio) -> str:
    workload = result.run.workload
    full = f" of {format_size(workload.full_bytes)}" if workload.scaled else ""
    pairs = "1 pair" if ratio.samples == 1 else f"{ratio.samples} pairs"
    size = f"{format_size(workload.bytes)}{full}"
    return f"{about.faster} over {about.slower}, rank {workload.rank}, {size}, {pairs}"


def _wall_clock(
    about: Study, claim: Claim, result: ResultFile, ratio: Ratio, slow_s: Sequence[float]
) -> Finding:
    """The most that the wall clock can shrink: by a save after every single step.

    No training was run for it: the save times are measured, at full size by the measured rate, and
    the step time is the workload's published one. What is saved of `n step + save` shrinks with n,
    the steps between two saves, which is not published with the claim.
    """
    step = workloads.load(claim.workload).step_time
    setting = _setting(about, result, ratio)
    if step is None:
        reason = "the workload has no published step time"
        return Finding(
            claim=claim,
            ours=None,
            interval=None,
            setting=setting,
            answer=Answer.NOT_COMPARABLE,
            reason=reason,
        )
    workload = result.run.workload
    save_s = median(slow_s) * workload.full_bytes / workload.bytes
    most = _share(save_s, ratio.ratio, step.seconds)
    interval = ratio.interval and Interval(
        _share(save_s, ratio.interval.low, step.seconds),
        _share(save_s, ratio.interval.high, step.seconds),
    )
    never = interval is not None and interval.high < claim.value
    gained_s = save_s * (1 - 1 / ratio.ratio)
    steps = (gained_s / claim.value - save_s) / step.seconds
    reason = (
        "not even with a save after every step"
        if never
        else f"computed, not trained; it would hold up to a save every {steps:.0f} steps, and the "
        "claim's own interval is not known"
    )
    return Finding(
        claim=claim,
        ours=most,
        interval=interval,
        setting=f"a save of {format_seconds(save_s)} by {about.slower} after every step of "
        f"{format_seconds(step.seconds)}",
        answer=Answer.NO if never else Answer.NOT_COMPARABLE,
        reason=reason,
    )


def _share(save_s: float, ratio: float, step_s: float) -> float:
    """The part of `step + save` that a save `ratio` times as fast gives back."""
    return save_s * (1 - 1 / ratio) / (save_s + step_s)
