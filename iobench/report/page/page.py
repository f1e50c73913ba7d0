"""The nouns of a report: a Page of Sections with Charts and Grids, and the records as Attachments.

They hold text from records as it is: `html` escapes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from iobench.report.answer import Line
from iobench.report.grid import Grid
from iobench.text import printable

__all__ = ["Attachment", "Chart", "Page", "Section"]


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
class Section:
    """A part of a page: its paragraphs, commands, charts, tables and sections, in this order.

    `commands` are lines for a shell. A `folded` section shows its heading until it is opened.
    """

    heading: str
    paragraphs: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    grids: tuple[Grid, ...] = ()
    sections: tuple[Section, ...] = ()
    folded: bool = False


@dataclass(frozen=True, kw_only=True)
class Attachment:
    """A file that the page carries, to be saved from it byte for byte."""

    name: str
    data: bytes

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return the file at `path`."""
        return cls(name=printable(path.name), data=path.read_bytes())


@dataclass(frozen=True, kw_only=True)
class Page:
    """A whole report. `kind` is what made its records, such as `iobench run`.

    `about` are the lines below the title. `answer` has the lines that the verb prints first, with
    commands; `caveats` say how far the answer can be trusted.
    """

    kind: str
    title: str
    about: tuple[str, ...] = ()
    answer: tuple[Line, ...] = ()
    caveats: tuple[Line, ...] = ()
    sections: tuple[Section, ...] = ()
    attachments: tuple[Attachment, ...] = ()

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
