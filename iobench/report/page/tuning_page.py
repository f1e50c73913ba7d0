"""The page of a journal of `iobench autotune`: race, parameters and confirmation."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from iobench.errors import IobenchError, ResultFileError, UsageError
from iobench.report.answer import Line
from iobench.report.grid import Grid
from iobench.report.page.charts.race import parameter_charts, race_chart, scale_of
from iobench.report.page.charts.spread import Dot, Spread, spread_spec
from iobench.report.page.environment import facts_section
from iobench.report.page.page import Attachment, Chart, Page, Section
from iobench.report.page.palette import colour_of
from iobench.report.page.rows import moment
from iobench.report.page.tables import spread_words, tables_section
from iobench.report.tuning import grid, notes
from iobench.results import Environment
from iobench.tune.emit import machine_words, storage_words
from iobench.tune.journal import read_journal
from iobench.tune.outcome import Outcome, Standing
from iobench.tune.replay import ReplayedTuning, replay
from iobench.units import count_of, format_size

__all__ = ["tuning_page"]


def tuning_page(paths: Sequence[Path]) -> Page:
    """Return the page of one journal. Raises UsageError for several, ResultFileError."""
    if len(paths) > 1:
        raise UsageError("one report shows one journal of iobench autotune; give them one by one")
    (path,) = paths
    header, trials = read_journal(path)
    try:
        return _page(path, replay(header, trials))
    except IobenchError:  # says itself what is wrong
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # its header is free-form
        raise ResultFileError(
            f"{path}: not a journal as iobench autotune writes it "
            f"({type(error).__name__}: {error!s:.80}); take an unedited copy of the file"
        ) from error


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
    figure = outcome.objective.show(chosen.loss, _size_bytes(found))
    yield Line("Chosen", (f"{chosen.candidate.label} at {figure}", *outcome.reasons()))
    spent = count_of(len(outcome.trials), "setting")
    yield Line(
        "Tried",
        (
            f"{spent} of {outcome.space.size}",
            f"{format_size(outcome.budget.written_bytes)} written",
        ),
    )


def _unfinished(found: ReplayedTuning, path: Path) -> Line:
    done = count_of(len(found.trials), "trial")
    return Line(
        "Not confirmed",
        (f"{done} recorded; iobench autotune --resume {shlex.quote(str(path))} goes on",),
    )


def _sections(found: ReplayedTuning) -> Iterator[Section]:
    outcome = found.outcome
    chosen = outcome.verdict.chosen if outcome else None
    if outcome:
        yield Section(heading="Confirmation", charts=(_confirmation(found, outcome),))
    if any(entry.losses for entry in found.race.trials.values()):
        yield Section(heading="Race", charts=(race_chart(found, chosen),))
        yield Section(heading="Parameters", charts=tuple(parameter_charts(found, chosen)))
    if outcome:
        yield tables_section([grid(outcome, _size_bytes(found))], notes(outcome))
    header = found.header
    environment = Environment(machine=header.machine, storage=header.storage)
    yield facts_section(environment, header.started_at, header.asked["target"])
    yield Section(heading="Repeat it", commands=(shlex.join(header.command),))


def _size_bytes(found: ReplayedTuning) -> int:
    """Return the bytes of a checkpoint of the confirmation, as they were saved."""
    confirmed = [one for one in found.trials if one.phase == "confirm"]
    saved = [one.measured.save.bytes for one in confirmed if one.measured.save]
    return saved[-1] if saved else confirmed[-1].size_bytes


def _confirmation(found: ReplayedTuning, outcome: Outcome) -> Chart:
    scale = scale_of(outcome.objective)
    rows = [_row(one, found, outcome) for one in outcome.standings()]
    spoken = "; ".join(f"{row.label} {row.figure}" for row in rows)
    return Chart(
        name="confirmation",
        title="Fresh samples of the best settings",
        alt=f"Confirmed settings, the chosen one first: {spoken}.",
        caption=f"One dot per sample; {spread_words(one.samples for one in outcome.standings())} "
        "The chosen setting is the first.",
        spec=spread_spec(rows, axis=scale.title, words=("round", "figure")),
        numbers=Grid(
            columns=(("setting", False), (scale.title, True), ("samples by round", False)),
            rows=[
                [row.label, f"{row.middle:.3f}", " ".join(f"{dot.x:.3f}" for dot in row.dots)]
                for row in rows
            ],
        ),
    )


def _row(one: Standing, found: ReplayedTuning, outcome: Outcome) -> Spread:
    scale, name = scale_of(outcome.objective), one.candidate.label
    show, size = outcome.objective.show, _size_bytes(found)
    role = " (baseline)" if name == outcome.baseline else ""
    held = one.interval
    bounds = sorted((scale.of(held.low), scale.of(held.high))) if held else None
    return Spread(
        label=f"{name}{role}",
        figure=show(one.loss, size).partition(" (")[0],
        colour=colour_of(one.candidate.writer),
        middle=scale.of(one.loss),
        bounds=(bounds[0], bounds[1]) if bounds else None,
        dots=[
            Dot(x=scale.of(loss), words={"round": str(number), "figure": show(loss, size)})
            for number, loss in outcome.confirmation.losses[name].items()
        ],
    )
