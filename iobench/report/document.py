"""Document: what a verb has found, of any kind of record. Renderers know nothing of the kinds.

Every text is as a record has it: each renderer escapes what its output would take for a command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from iobench.report.grid import Grid, words
from iobench.report.palette import CIRCLE


@dataclass(frozen=True)
class Line:
    """One subject, such as `Save`, and one or several lines about it.

    `commands` marks lines that are for a shell: they must not be wrapped. A `caveat` says how far
    the answer can be trusted.
    """

    subject: str
    texts: tuple[str, ...]
    commands: bool = False
    caveat: bool = False


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart as a Vega-Lite spec that is as wide as its container (see `theme.spec_of`).

    `--chart NAME` chooses it by its `name`, of lower-case letters, digits and hyphens. `alt` says
    in words what it shows, for people who cannot see it. `caption` says how to read it. `numbers`
    is the table of its figures.
    A picture of the chart alone has `headline` as its title, or else `title`.
    """

    name: str
    title: str
    alt: str
    spec: Mapping[str, Any]
    caption: str = ""
    headline: str = ""
    numbers: Grid | None = None


@dataclass(frozen=True, kw_only=True)
class Dot:
    """One sample, with the words of its tooltip by heading."""

    x: float
    y: float = 0.0
    shape: str = CIRCLE
    words: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """One row of a chart: a figure, the bounds of its interval, and its samples.

    `figure` is the text on the right. A `hollow` row has a figure that does not count.
    """

    label: str
    figure: str
    colour: str
    middle: float
    bounds: tuple[float, float] | None = None
    dots: Sequence[Dot] = ()
    shape: str = CIRCLE
    hollow: bool = False


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a page: its commands, charts, tables and sections, in this order.

    `commands` are lines for a shell.
    """

    heading: str
    commands: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    grids: tuple[Grid, ...] = ()
    sections: tuple[Section, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Details:
    """What the terminal shows with -v only, and every other format always."""

    tables: tuple[Grid, ...] = ()
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.tables or self.notes)


@dataclass(frozen=True, kw_only=True)
class Document:
    """All that a renderer shows. `kind` is what made the records, such as `iobench run`.

    `about` are the lines below the title: where and when. `data` is the JSON document, and `rows`
    the key of its list of rows, which CSV has. `draw` returns the sections of charts, and loads the
    libraries that draw them. `appendix` are the last sections of a page. `records` are files that a
    page carries, to be saved from it byte for byte. `incomplete` says that a record has no end.
    """

    kind: str
    title: str
    about: tuple[str, ...] = ()
    answer: tuple[Line, ...] = ()
    tables: tuple[Grid, ...] = ()
    notes: tuple[str, ...] = ()
    details: Details = Details()
    data: Mapping[str, Any] = field(default_factory=dict)
    rows: str = ""
    draw: Callable[[], Iterable[Section]] = tuple
    appendix: tuple[Section, ...] = ()
    records: tuple[Path, ...] = ()
    incomplete: str | None = None

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """The sections of a page: the tables, the charts, details and notes, the appendix."""
        notes = [[note] for note in (*self.notes, *self.details.notes)]
        below = [Grid(columns=words("notes", sentence=True), rows=notes)] if notes else []
        more = (*self.details.tables, *below)
        return (
            *([Section(heading="Figures", grids=self.tables)] if self.tables else []),
            *(one for one in self.draw() if one.charts or one.sections),
            *([Section(heading="Details", grids=more)] if more else []),
            *self.appendix,
        )

    @property
    def charts(self) -> dict[str, Chart]:
        """All charts in the order of the page; the second of a name is `NAME-2`."""
        named: dict[str, Chart] = {}
        for chart in _charts(self.sections):
            number = sum(one.name == chart.name for one in named.values()) + 1
            named[chart.name if number == 1 else f"{chart.name}-{number}"] = chart
        return named


def _charts(sections: Iterable[Section]) -> Iterator[Chart]:
    for one in sections:
        yield from one.charts
        yield from _charts(one.sections)
