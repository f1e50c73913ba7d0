"""Published claims about checkpoint I/O, and the measurements that judge each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from iobench.errors import UnknownNameError
from iobench.stats.estimates import Interval

__all__ = [
    "CLAIMS",
    *("Answer", "Claim", "ClaimFinding", "ClaimMeasure", "Side", "Study", "study"),
]

ClaimMeasure = Literal["save", "restore", "wall clock", "overhead", "stall"]


class Answer(StrEnum):
    """Whether a claim holds here."""

    YES = "yes"
    NO = "no"
    UNDECIDED = "undecided"
    NOT_COMPARABLE = "not comparable"


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of a claim: a writer, and its mode in the syntax of `iobench train`."""

    writer: str = ""
    mode: str = "none"

    def __str__(self) -> str:
        return f"{self.writer} {self.mode}".strip()


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One published figure, `value`, for checkpoints of `workload`: `ours` compared with `theirs`.

    - `save`, `restore`: how many times as fast, at least
    - `stall`: how many times shorter, at least
    - `wall clock`: the share of the wall clock of training that is saved, at least
    - `overhead`: the share that checkpoints add to the wall clock of training without any, at most
    """

    text: str
    workload: str
    measure: ClaimMeasure
    value: float
    ours: Side
    theirs: Side

    @property
    def ratio(self) -> float:
        """How many times as fast as `theirs` the claim says that `ours` is, at least."""
        match self.measure:
            case "wall clock":
                return 1 / (1 - self.value)
            case "overhead":
                return 1 / (1 + self.value)
        return self.value

    @property
    def is_of_files(self) -> bool:
        """Whether files are saved and restored to judge it, like `iobench run`; else it trains."""
        return self.measure in ("save", "restore")


@dataclass(frozen=True, kw_only=True)
class Study:
    """Claims of one source.

    `every` is the interval of checkpoints in training, in the syntax of `iobench train`, and a
    block has `intervals` of them. With `interval_claimed` it is part of the claim, and a record
    with another interval is not comparable.
    """

    name: str
    source: str
    claims: tuple[Claim, ...]
    every: str
    intervals: int = 3
    interval_claimed: bool = False

    @property
    def workloads(self) -> tuple[str, ...]:
        """The workloads that must be measured, each once."""
        return tuple(dict.fromkeys(claim.workload for claim in self.claims))

    def of(self, workload: str, *, files: bool) -> tuple[Claim, ...]:
        """Return the claims that one record of `workload` answers."""
        return tuple(c for c in self.claims if c.workload == workload and c.is_of_files == files)


@dataclass(frozen=True, kw_only=True)
class ClaimFinding:
    """Our figure for a claim: `ours` in the claim's unit, None where there is no such figure.

    `ci95` is its interval, with the confidence that `pairs` pairs reach, 95% at most. `setting`
    describes the measured setting. `reason` explains the answer. With `bound` the figure is an
    upper bound, computed and not from training.
    """

    claim: Claim
    ours: float | None
    ci95: Interval | None
    setting: str
    answer: Answer
    reason: str
    pairs: int
    bound: bool = False


def _hybrid_io() -> Iterator[Claim]:
    ours, theirs = Side(writer="hybrid", mode="sync"), Side(writer="buffered", mode="sync")
    figures: tuple[tuple[str, ClaimMeasure, float], ...] = (
        ("writes 1.7x", "save", 1.7),
        ("restores 1.6x", "restore", 1.6),
    )
    for workload, wall in (("llama7b", 0.12), ("gpt5b-nemo", 0.17)):
        shortened: tuple[str, ClaimMeasure, float] = (f"wall clock -{wall:.0%}", "wall clock", wall)
        for text, measure, value in (*figures, shortened):
            yield Claim(
                text=text,
                workload=workload,
                measure=measure,
                value=value,
                ours=ours,
                theirs=theirs,
            )


def _overhead(text: str, value: float, mode: str) -> tuple[Claim, ...]:
    """Return claims for a rank that writes the whole model and for one of several with a shard."""
    return tuple(
        Claim(
            text=text,
            workload=workload,
            measure="overhead",
            value=value,
            ours=Side(writer="hybrid", mode=mode),
            theirs=Side(),
        )
        for workload in ("gpt5b-nemo", "llama3-8b")
    )


def _stalls() -> Iterator[Claim]:
    stock, own = Side(writer="peer:torch-save", mode="sync"), Side(writer="hybrid", mode="sync")
    for mode, theirs in (("async=2", stock), ("lazy=2", stock), ("async=2", own)):
        yield Claim(
            text="stall 54.2x shorter",
            workload="gpt5b-nemo",
            measure="stall",
            value=54.2,
            ours=Side(writer="hybrid", mode=mode),
            theirs=theirs,
        )


CLAIMS = {
    one.name: one
    for one in (
        Study(
            name="hybrid-io",
            source="DDN on Hybrid-IO: per thread, LLaMA2-7B and NeMo GPT-5B",
            claims=tuple(_hybrid_io()),
            every="10",
        ),
        Study(
            name="checkfreq",
            source="CheckFreq (FAST '21): one snapshot in memory, as often as 3.5% allow",
            claims=_overhead("overhead <= 3.5%", 0.035, "lazy=1"),
            every="3.5%",
            interval_claimed=True,
        ),
        Study(
            name="pccheck",
            source="PCcheck (ASPLOS '25): several snapshots in memory, every 10 iterations",
            claims=_overhead("overhead about 3%", 0.03, "lazy=2"),
            every="10",
            interval_claimed=True,
        ),
        Study(
            name="async",
            source="ByteCheckpoint (NSDI '25, arXiv 2407.20143): stall, on average",
            claims=tuple(_stalls()),
            every="10",
        ),
    )
}


def study(name: str) -> Study:
    """Return the study of that name. Raises UnknownNameError."""
    if name not in CLAIMS:
        raise UnknownNameError("claim", name, list(CLAIMS))
    return CLAIMS[name]
