"""The writer's file of a tuning: the writer, its options, and a comment with the main results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from iobench.bench.judging.verdict import VerdictStatus
from iobench.text import printable
from iobench.tune.journal import TuningRecord
from iobench.tune.outcome import Outcome
from iobench.tune.tuning import Tuning
from iobench.units import format_size
from iobench.writers.config import Tuned, dump_writer


def emit(outcome: Outcome, tuning: Tuning, header: TuningRecord) -> str:
    """Return the text of the file from which `iobench.load_writer` makes the tuned writer."""
    tuned = _tuned(outcome, tuning, header)
    return dump_writer(
        outcome.chosen.make(),
        tuned,
        file_format=_format(tuning),
        comment=_comment(outcome, tuned),
    )


def _tuned(outcome: Outcome, tuning: Tuning, header: TuningRecord) -> Tuned:
    chosen, *_ = outcome.standings()
    size = tuning.actual_bytes(outcome.size_bytes)
    show = outcome.race.objective.show
    over = outcome.verdict.over_baseline
    interval = chosen.interval
    runner_up = outcome.runner_up
    name = chosen.candidate.label
    lead = outcome.confirmation.compare(name, runner_up) if runner_up else None
    return Tuned(
        date=header.started_at,
        iobench=header.iobench,
        workload=f"{tuning.workload.name}, rank {tuning.asked.rank}: {format_size(size)} of "
        f"{format_size(tuning.full_bytes)}",
        objective=outcome.race.objective.goal,
        target=tuning.target.location,
        storage=printable(str(header.storage)),
        machine=printable(", ".join(header.machine.words())),
        fingerprint=header.machine.fingerprint or "",
        size_bytes=size,
        samples=chosen.samples,
        median=show(chosen.loss, size),
        interval=f"{show(interval.high, size)} to {show(interval.low, size)}" if interval else "",
        paths=chosen.paths,
        verdict=chosen.verdict.status.value if chosen.verdict else None,
        finding=next(outcome.reasons(), "the only setting that works here"),
        baseline=outcome.baseline,
        ratio=round(over.ratio.ratio, 4) if over else None,
        ratio_interval=(round(over.ratio.interval.low, 4), round(over.ratio.interval.high, 4))
        if over and over.ratio.interval
        else None,
        runner_up=runner_up,
        over_runner_up=round(lead.ratio.ratio, 4) if lead else None,
    )


def _comment(outcome: Outcome, tuned: Tuned) -> Iterator[str]:
    judged = outcome.standings()[0].verdict
    yield f"{outcome.chosen.writer} for {outcome.race.objective.goal} of {tuned.workload}"
    yield f"on {tuned.storage}: {tuned.median}."
    yield f"{tuned.finding}."
    if judged and judged.status in (VerdictStatus.INVALID, VerdictStatus.UNPROVED):
        yield f"The figures are {judged.status}: {judged.reasons[0]}."
    yield f"By iobench autotune, {tuned.date[:10]}. In the trainer:"
    yield '    writer = iobench.load_writer("writer.toml")'


def _format(tuning: Tuning) -> str:
    """Return the format that most of the workload's bytes have."""
    sizes: Counter[str] = Counter()
    for spec in tuning.workload.files(tuning.asked.rank):
        sizes[spec.format] += spec.size_bytes
    return max(sizes, key=lambda name: (sizes[name], name))
