"""`iobench show` and `report`: print records of any kind, or make a page or a picture of them."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from iobench.cli.given import print_warning
from iobench.cli.pages import check_page, write_file
from iobench.errors import UnknownNameError, UsageError
from iobench.report.render import render
from iobench.text import printable

if TYPE_CHECKING:
    from iobench.report.document import Document

ShowFormat = Literal["table", "md", "csv", "json", "html", "svg", "png"]
_PICTURES = ("svg", "png")
_BY_SUFFIX: dict[str, ShowFormat] = {f".{one}": one for one in get_args(ShowFormat)} | {
    ".htm": "html"
}


def show(
    records: list[Path],
    format_: ShowFormat | None = None,
    output: Path | None = None,
    chart: str | None = None,
    verbose: bool = False,
) -> None:
    """Show records of runs, trainings and tunings.

    As a table, Markdown, CSV, JSON, one HTML page with charts, or one chart as a picture.

    Arguments:
        RECORD...: Records of iobench run, train or autotune. Several runs make one page.

    Options:
        --format: How to show it; html is a page with charts, svg and png are one chart. [by the
            name of -o, else table]
        -o, --output FILE: Write to this file. Only a page is ever replaced.
        --chart NAME: The chart of a picture. [the first one]
        -v, --verbose: Add machine, phases, latencies and all notes to the table.
    """
    form = format_ or _by_name(output)
    if chart is not None and form not in _PICTURES:
        raise UsageError("--chart chooses the chart of a picture; give -o FILE.svg or FILE.png")
    if verbose and form != "table":
        raise UsageError(f"-v: --format {form} has all details; leave out -v")
    if form == "html" or form in _PICTURES:
        if output is None:
            raise UsageError(f"--format {form}: is a file; give -o FILE.{form}")
        check_page(output, form)
    elif len(records) > 1:
        raise UsageError(f"--format {form} shows one record; give one, or -o FILE.html for all")
    elif output is not None and output.exists():
        raise UsageError(f"-o {output}: exists; choose another name")
    from iobench.report.kinds import document_of

    document = document_of(records)
    if document.incomplete:
        print_warning(document.incomplete)
    if verbose and not document.details:
        raise UsageError("-v: this record is always shown whole; leave out -v")
    if output is None:
        render(document, form, sys.stdout, details=verbose)
        return
    if form in _PICTURES:
        write_file(output, _picture(document, chart, form))
        print(f"picture: {printable(str(output))}", file=sys.stderr)
        return
    text = io.StringIO()
    render(document, form, text, details=verbose)
    write_file(output, text.getvalue().encode("utf-8", "backslashreplace"))
    if form == "html":
        print(f"report: {printable(str(output))}", file=sys.stderr)


def _picture(document: Document, name: str | None, form: str) -> bytes:
    """Return the picture of the chart of this name, or of the first one."""
    from iobench.report.page.html import draw

    charts = document.charts
    if not charts:
        raise UsageError("-o: there is no chart, because nothing was measured")
    chosen = name or next(iter(charts))
    if chosen not in charts:
        raise UnknownNameError("chart", chosen, charts)
    return draw(charts[chosen], form)


def _by_name(output: Path | None) -> ShowFormat:
    return "table" if output is None else _BY_SUFFIX.get(output.suffix.lower(), "table")


def report(records: list[Path], output: Path) -> None:
    """Make one HTML page of records: iobench show -o FILE.html.

    Arguments:
        RECORD...: Records of iobench run, train or autotune. Several runs make one page.

    Options:
        -o, --output FILE: The page: one HTML file; an older one is replaced.
    """
    show(records, "html", output)
