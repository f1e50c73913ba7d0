"""Published claims about checkpoint I/O, and the measurements that judge each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, cast

from iobench.errors import UnknownNameError
from iobench.stats.estimates import Interval

ClaimMeasure = Literal["save", "restore", "wall clock", "overhead", "stall"]


class Answer(StrEnum):
    """Whether a claim holds here."""

    YES = "yes"
    NO = "no"
    UNDECIDED = "undecided"
    NOT_COMPARABLE = "not comparable"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One published figure, `value`, for checkpoints of `workload`: `ours` compared with `theirs`.

    Each is a writer and its mode in the syntax of `iobench train`: `hybrid lazy=1`, or `none`.
    - `save`, `restore`: how many times as fast, at least
    - `stall`: how many times shorter, at least
    - `wall clock`: the share of the wall clock of training that is saved, at least
    - `overhead`: the share that checkpoints add to the wall clock of training without any, at most
    """

    text: str
    workload: str
    measure: ClaimMeasure
    value: float
    ours: str
    theirs: str

    @property
    def ratio(self) -> float:
        """How many times as fast as `theirs` the claim says that `ours` is, at least."""
        match self.measure:
            case "wall clock":
                return 1 / (1 - self.value)
            case "overhead":
                return 1 / (1 + self.value)
        return self.value

    def figure(self, times: float) -> float:
        """Return in the unit of the claim that `ours` is so many times as fast as `theirs`."""
        match self.measure:
            case "wall clock":
                return 1 - 1 / times
            case "overhead":
                return 1 / times - 1
        return times

    @property
    def is_of_files(self) -> bool:
        """Whether files are saved and restored to judge it, like `iobench run`; else it trains."""
        return self.measure in ("save", "restore")


@dataclass(frozen=True, kw_only=True)
class Study:
    """Claims of one source.

    `every` is the interval of checkpoints in training, in the syntax of `iobench train`. With
    `interval_claimed` it is part of the claim, and a record with another one is not comparable.
    """

    name: str
    source: str
    claims: tuple[Claim, ...]
    every: str
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
    describes the measured setting. `reason` explains the answer.
    """

    claim: Claim
    ours: float | None
    ci95: Interval | None
    setting: str
    answer: Answer
    reason: str
    pairs: int


_TABLE = """
hybrid-io, llama7b, writes 1.7x, save, 1.7, hybrid sync, buffered sync
hybrid-io, llama7b, restores 1.6x, restore, 1.6, hybrid sync, buffered sync
hybrid-io, llama7b, wall clock -12%, wall clock, 0.12, hybrid sync, buffered sync
hybrid-io, gpt5b-nemo, writes 1.7x, save, 1.7, hybrid sync, buffered sync
hybrid-io, gpt5b-nemo, restores 1.6x, restore, 1.6, hybrid sync, buffered sync
hybrid-io, gpt5b-nemo, wall clock -17%, wall clock, 0.17, hybrid sync, buffered sync
checkfreq, gpt5b-nemo, overhead <= 3.5%, overhead, 0.035, hybrid lazy=1, none
checkfreq, llama3-8b, overhead <= 3.5%, overhead, 0.035, hybrid lazy=1, none
pccheck, gpt5b-nemo, overhead about 3%, overhead, 0.03, hybrid lazy=2, none
pccheck, llama3-8b, overhead about 3%, overhead, 0.03, hybrid lazy=2, none
async, gpt5b-nemo, stall 54.2x shorter, stall, 54.2, hybrid async=2, peer:torch-save sync
async, gpt5b-nemo, stall 54.2x shorter, stall, 54.2, hybrid lazy=2, peer:torch-save sync
async, gpt5b-nemo, stall 54.2x shorter, stall, 54.2, hybrid async=2, hybrid sync
"""
"""Study, workload, text, measure and figure of each claim, our side, and the other one. Of two
workloads one has a rank that writes the whole model, and one several with a shard each."""


_STUDIES = """
hybrid-io | 10 | | DDN on Hybrid-IO: per thread, LLaMA2-7B and NeMo GPT-5B
checkfreq | 3.5% | claimed | CheckFreq (FAST '21): one snapshot in memory, as often as 3.5% allow
pccheck | 10 | claimed | PCcheck (ASPLOS '25): several snapshots in memory, every 10 iterations
async | 10 | | ByteCheckpoint (NSDI '25, arXiv 2407.20143): stall, on average
"""
"""Name, interval of checkpoints, whether it is part of the claim, and source of each study."""


def _claims(of: str) -> Iterator[Claim]:
    for line in _TABLE.strip().splitlines():
        name, workload, text, measure, value, ours, theirs = map(str.strip, line.split(","))
        if name == of:
            yield Claim(
                text=text,
                workload=workload,
                measure=cast(ClaimMeasure, measure),
                value=float(value),
                ours=ours,
                theirs=theirs,
            )


def _study(line: str) -> Study:
    name, every, claimed, source = (cell.strip() for cell in line.split("|"))
    return Study(
        name=name,
        source=source,
        claims=tuple(_claims(name)),
        every=every,
        interval_claimed=bool(claimed),
    )


CLAIMS = {one.name: one for one in map(_study, _STUDIES.strip().splitlines())}


def study(name: str) -> Study:
    if name not in CLAIMS:
        raise UnknownNameError("claim", name, list(CLAIMS))
    return CLAIMS[name]
