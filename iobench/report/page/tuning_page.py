"""The page of a journal of `iobench autotune`: race and confirmation."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from iobench.errors import UsageError
from iobench.report.answer import Line
from iobench.report.grid import Grid
from iobench.report.page.charts.spread import Dot, Spread, spread_spec
from iobench.report.page.environment import facts_section
from iobench.report.page.page import Attachment, Chart, Page, Section
from iobench.report.page.palette import colour_of
from iobench.report.page.rows import moment
from iobench.report.page.tables import spread_words, tables_section
from iobench.report.tuning import (
    confirmed_bytes,
    grid,
    journal_errors,
    notes,
    race_grid,
    unfinished,
)
from iobench.results import Environment
from iobench.tune.emit import machine_words, storage_words
from iobench.tune.journal import read_journal
from iobench.tune.outcome import Outcome, Standing
from iobench.tune.replay import ReplayedTuning, replay
from iobench.units import GIB, count_of, format_size

__all__ = ["tuning_page"]


def tuning_page(paths: Sequence[Path]) -> Page:
    """Return the page of one journal. Raises UsageError for several, ResultFileError."""
    if len(paths) > 1:
        raise UsageError("one report shows one journal of iobench autotune; give them one by one")
    (path,) = paths
    header, trials = read_journal(path)
    with journal_errors(path):
        return _page(path, replay(header, trials))


def _page(path: Path, found: ReplayedTuning) -> Page:
    header = found.header
    outcome, when = found.outcome, moment(header.started_at)
    title = f"{header.asked['workload']}, rank {header.asked['rank']}: the best setting for "
    return Page(
        kind="iobench autotune",
        title=title + found.objective.goal,
        about=(f"{machine_words(header)}, {storage_words(header)}", f"measured {when}"),
        answer=tuple(_answer(found)),
        caveats=() if outcome else (_unfinished(found, path),),
        sections=tuple(_sections(found)),
        attachments=(Attachment.of(path),),
    )


def _answer(found: ReplayedTuning) -> Iterator[Line]:
    outcome = found.outcome
    if outcome is None:
        return
    chosen, *_ = outcome.standings()
    figure = outcome.objective.show(chosen.loss, confirmed_bytes(found))
    yield Line("Chosen", (f"{chosen.candidate.label} at {figure}", *outcome.reasons()))
    spent = count_of(len(outcome.tried()), "setting")
    yield Line(
        "Tried",
        (
            f"{spent} of {outcome.space.size}",
            f"{format_size(outcome.budget.written_bytes)} written",
        ),
    )


def _unfinished(found: ReplayedTuning, path: Path) -> Line:
    return Line("Not confirmed", (unfinished(found, path).removeprefix("not confirmed: "),))


def _sections(found: ReplayedTuning) -> Iterator[Section]:
    outcome = found.outcome
    if outcome:
        yield Section(heading="Confirmation", charts=(_confirmation(found, outcome),))
    if any(entry.losses for entry in found.race.trials.values()):
        yield tables_section([race_grid(found)], (), heading="Race")
    if outcome:
        yield tables_section([grid(outcome, confirmed_bytes(found))], notes(outcome, found.header))
    header = found.header
    environment = Environment(machine=header.machine, storage=header.storage)
    yield facts_section(environment, header.started_at, header.asked["target"])
    yield Section(heading="Repeat it", commands=(shlex.join(header.command),))


def _axis(outcome: Outcome) -> str:
    """Return the title of the axis, with the unit in which losses are drawn."""
    return "stall, ms" if outcome.objective.goal == "stall" else "GiB/s"


def _drawn(outcome: Outcome, loss: float) -> float:
    return 1e3 * loss if outcome.objective.goal == "stall" else 1 / loss / GIB


def _confirmation(found: ReplayedTuning, outcome: Outcome) -> Chart:
    axis = _axis(outcome)
    rows = [_row(one, found, outcome) for one in outcome.standings()]
    spoken = "; ".join(f"{row.label} {row.figure}" for row in rows)
    return Chart(
        name="confirmation",
        title="Fresh samples of the best settings",
        alt=f"Confirmed settings, the chosen one first: {spoken}.",
        caption=f"One dot per sample; {spread_words(one.samples for one in outcome.standings())} "
        "The chosen setting is the first.",
        spec=spread_spec(rows, axis=axis, words=("round", "figure")),
        numbers=Grid(
            columns=(("setting", False), (axis, True), ("samples by round", False)),
            rows=[
                [row.label, f"{row.middle:.3f}", " ".join(f"{dot.x:.3f}" for dot in row.dots)]
                for row in rows
            ],
        ),
    )


def _row(one: Standing, found: ReplayedTuning, outcome: Outcome) -> Spread:
    name = one.candidate.label
    show, size = outcome.objective.show, confirmed_bytes(found)
    role = " (baseline)" if name == outcome.baseline else ""
    held = one.interval
    bounds = sorted(_drawn(outcome, loss) for loss in (held.low, held.high)) if held else None
    return Spread(
        label=f"{name}{role}",
        figure=show(one.loss, size).partition(" (")[0],
        colour=colour_of(one.candidate.writer),
        middle=_drawn(outcome, one.loss),
        bounds=(bounds[0], bounds[1]) if bounds else None,
        dots=[
            Dot(x=_drawn(outcome, loss), words={"round": str(number), "figure": show(loss, size)})
            for number, loss in outcome.confirmation.losses[name].items()
        ],
    )
