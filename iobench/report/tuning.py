"""The document of a journal of `iobench autotune`: its result, or the race so far."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from iobench.report.document import Details, Document, Line, Section
from iobench.report.facts import environment_line, facts_section, moment
from iobench.report.grid import MISSING, Column, Grid, shown, span
from iobench.results import Environment
from iobench.results.codec import to_plain
from iobench.stats.estimates import Ratio, interval_heading, median
from iobench.tune.journal import TuningRecord, read_journal
from iobench.tune.outcome import Outcome, Standing
from iobench.tune.race import Race, RaceEntry
from iobench.tune.replay import replay
from iobench.units import count_of, format_seconds, format_size

SCHEMA = "iobench.tuning/1"


def tuning_document(path: Path, outcome: Outcome | None = None) -> Document:
    """Return the document of the journal at `path`: its result, or the race so far.

    `outcome` is that of the tuner, which knows more than a journal, such as writers left out.
    Raises ResultFileError for a file that is not a journal.
    """
    header, trials = read_journal(path)
    race, replayed = replay(header, trials)
    return _document(path, header, race, outcome or replayed)


def _document(path: Path, header: TuningRecord, race: Race, outcome: Outcome | None) -> Document:
    asked = header.asked
    goal = f"{asked.workload}, rank {asked.rank}: the best setting for {asked.objective}"
    raced = [_race_grid(race)] if any(one.losses for one in race.trials.values()) else []
    environment = Environment(machine=header.machine, storage=header.storage)
    document = Document(
        kind="iobench autotune",
        title=goal,
        about=(environment_line(environment), f"measured {moment(header.started_at)}"),
        answer=(_unfinished(race, path),),
        tables=tuple(raced),
        data=_data(header) | {"chosen": None, "tried": _tried(race.trials)},
        rows="tried",
        appendix=(
            facts_section(environment, header.started_at, asked.target),
            Section(heading="Repeat it", commands=(shlex.join(header.command),)),
        ),
        records=(path,),
    )
    if outcome is None:
        return document
    size_bytes = _confirmed_bytes(outcome)
    return replace(
        document,
        title=f"{goal}, confirmed with {format_size(size_bytes)}",
        answer=tuple(_answer(outcome, size_bytes)),
        tables=(_grid(outcome, size_bytes),),
        notes=tuple(notes(outcome, header)),
        details=Details(tables=tuple(raced)),
        data=_data(header) | _result(outcome, size_bytes),
        rows="confirmed",
    )


def _answer(outcome: Outcome, size_bytes: int) -> Iterator[Line]:
    chosen, *_ = outcome.standings()
    figure = outcome.race.objective.show(chosen.loss, size_bytes)
    yield Line("Chosen", (f"{chosen.candidate.label} at {figure}", *outcome.reasons()))
    spent = (
        f"{len(outcome.race.trials)} of {outcome.space.size} settings in "
        f"{format_seconds(outcome.race.budget.spent_s)}, "
        f"{format_size(outcome.race.budget.written_bytes)} written"
    )
    yield Line("Tried", (spent,))


def _unfinished(race: Race, path: Path) -> Line:
    """Return how far a tuning without a confirmation is, and how it goes on."""
    done = count_of(sum(len(one.measured) for one in race.trials.values()), "trial")
    again = f"{done} recorded; iobench autotune --resume {shlex.quote(str(path))}"
    return Line("Not confirmed", (again,), caveat=True)


def _confirmed_bytes(outcome: Outcome) -> int:
    """Return the bytes of a checkpoint of the confirmation, as they were saved."""
    confirmed = (one for entry in outcome.race.trials.values() for one in entry.of("confirm"))
    return next((one.save.bytes for one in confirmed if one.save), outcome.size_bytes)


def _race_grid(race: Race) -> Grid:
    """Return the table of the race: a setting a row, with its rounds and why it failed."""

    def middle(row: tuple[str, RaceEntry]) -> str:
        losses = row[1].losses
        if not losses:
            return MISSING
        sizes = {step.round: step.size_bytes for step, _ in row[1].measured}
        loss = median(list(losses.values()))
        return _short(race.objective.show(loss, sizes[max(losses)]), bare=True)

    columns: tuple[Column[tuple[str, RaceEntry]], ...] = (
        Column("setting", lambda row: row[0], figure=False),
        Column("rounds", lambda row: str(len(row[1].losses))),
        Column("median" if race.objective.goal == "stall" else "median, GiB/s", middle),
        Column("failed", lambda row: row[1].cause or MISSING, figure=False),
    )
    return Grid.of(race.trials.items(), columns, "race")


def _grid(outcome: Outcome, size: int) -> Grid:
    show, standings = outcome.race.objective.show, outcome.standings()
    figure = "stall" if outcome.race.objective.goal == "stall" else "GiB/s\n(GB/s)"

    def interval(one: Standing) -> str:
        ends = one.interval and (one.interval.high, one.interval.low)
        return span(ends, lambda loss: _short(show(loss, size), bare=True))

    def over(one: Standing) -> Ratio | None:
        return one.over_baseline.ratio if one.over_baseline else None

    def beyond(one: Standing) -> str:
        found = over(one)
        return span(found.interval if found else None, "{:.2f}".format)

    columns: tuple[Column[Standing], ...] = (
        Column("setting", lambda one: one.candidate.label, figure=False),
        Column("", lambda one: _role(one, outcome), figure=False),
        Column(figure, lambda one: _short(show(one.loss, size))),
        Column(interval_heading(one.samples for one in standings), interval, 5),
        Column(
            f"times\n{outcome.baseline or 'baseline'}",
            lambda one: shown(over(one), lambda found: f"{found.ratio:.2f}"),
        ),
        Column(interval_heading(one.samples for one in map(over, standings) if one), beyond, 4),
        Column("CPU\ns/GiB", lambda one: shown(one.cpu_s_per_gib, "{:.2f}".format), 1),
        Column("memory", lambda one: shown(one.memory_bytes, format_size), 2),
        Column("samples", lambda one: str(one.samples), 3),
        Column(
            "verdict",
            lambda one: shown(one.verdict, lambda found: found.status.value),
            figure=False,
        ),
    )
    return Grid.of(standings, columns)


def _data(header: TuningRecord) -> dict[str, Any]:
    """Return the part of the JSON that every journal has. Numbers are unrounded."""
    environment = {"machine": to_plain(header.machine), "storage": to_plain(header.storage)}
    return {"schema": SCHEMA, "asked": to_plain(header.asked), "environment": environment}


def _result(outcome: Outcome, size_bytes: int) -> dict[str, Any]:
    verdict = outcome.verdict
    return {
        "chosen": outcome.chosen.label,
        "baseline": outcome.baseline,
        "keep_baseline": outcome.keeps_baseline,
        "decided": outcome.decided,
        "runner_up": outcome.runner_up,
        "equals": list(verdict.equals),
        "refuted": verdict.refuted,
        "size_bytes": size_bytes,
        "confirmed": [_standing(one) for one in outcome.standings()],
        "reasons": list(outcome.reasons()),
        "space": {
            "settings": outcome.space.size,
            "writers": sorted(outcome.space.dimensions),
            "left_out": list(outcome.space.left_out),
        },
        "tried": _tried(outcome.race.trials),
        "spent_s": outcome.race.budget.spent_s,
        "written_bytes": outcome.race.budget.written_bytes,
    }


def _tried(trials: Mapping[str, RaceEntry]) -> list[dict[str, Any]]:
    return [
        {
            "setting": name,
            "origin": trial.candidate.origin,
            "cause": trial.cause,
            "rounds": len(trial.losses),
            "losses": list(trial.losses.values()),
        }
        for name, trial in trials.items()
    ]


def notes(outcome: Outcome, header: TuningRecord) -> Iterator[str]:
    """Yield what limits the answer, and the outcome of settings that are not in the table."""
    if record := header.asked.floor_record:
        yield f"differences up to {100 * header.asked.floor:.1f}% are noise, by A/A in {record}"
    chosen, *_ = outcome.standings()
    if chosen.paths:
        yield f"its bytes went {' and '.join(chosen.paths)}"
    if chosen.verdict:
        yield from (f"{chosen.candidate.label}: {reason}" for reason in chosen.verdict.reasons)
    for name, cause in outcome.failures().items():
        yield f"{name}: {cause}"
    for line in outcome.space.left_out:
        yield f"left out: {line}"


def _role(one: Standing, outcome: Outcome) -> str:
    label = one.candidate.label
    roles = []
    if label == outcome.verdict.chosen:
        roles.append("chosen")
    if label == outcome.runner_up:
        roles.append("runner-up")
    if label == outcome.baseline:
        roles.append("baseline")
    elif one.candidate.well_known:
        roles.append("known good")
    return ", ".join(roles)


def _short(figure: str, bare: bool = False) -> str:
    """Return `2.31 (2.48)` for `2.31 GiB/s (2.48 GB/s)`; `bare` drops the part in brackets."""
    text = figure.partition(" per ")[0]
    text = text.replace(" GiB/s", "").replace(" GB/s", "")
    return text.partition(" (")[0] if bare else text


def _standing(one: Standing) -> dict[str, Any]:
    over = one.over_baseline
    return {
        "setting": one.candidate.label,
        "writer": one.candidate.writer,
        "options": to_plain(one.candidate.options.to_dict()),
        "origin": one.candidate.origin,
        "samples": one.samples,
        "loss": one.loss,
        "loss_ci95": one.interval,
        "ratio": over.ratio.ratio if over else None,
        "ratio_ci95": over.ratio.interval if over else None,
        "finding": over.finding.value if over else None,
        "cpu_s_per_gib": one.cpu_s_per_gib,
        "memory_bytes": one.memory_bytes,
        "paths": list(one.paths),
        "verdict": one.verdict.status.value if one.verdict else None,
        "verdict_reasons": [str(reason) for reason in one.verdict.reasons] if one.verdict else [],
        "save_s": one.save_s,
        "restore_s": one.restore_s,
    }
