"""Markdown, JSON and the page of every published record have the same numbers."""

from __future__ import annotations

import csv
import html
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from iobench.report.kinds import document_of
from iobench.report.page import html as page
from iobench.report.render import render

_RECORDS = sorted((Path(__file__).parents[3] / "results").glob("*.jsonl"))
_NUMBER = re.compile(
    r"(?<![\w.])([+-]?[0-9][0-9,]*(?:\.[0-9]+)?)(?: ?(GiB|MiB|KiB|B|ms|µs|s|%)\b)?(%)?"
)
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1, "s": 1, "ms": 1e-3, "µs": 1e-6}
_UNITS |= {"%": 1e-2, "": 1}
_RATE = (2**30, 1e9)  # GiB/s, and GB/s in brackets

Row = Mapping[str, Any]
Values = Callable[[Row], list[float | None]]


def _of(*names: str) -> Values:
    """The values of these fields; an interval has two."""

    def values(row: Row) -> list[float | None]:
        parts = [row[name] for name in names]
        return [one for part in parts for one in (part if isinstance(part, list) else [part])]

    return values


def _memory(row: Row) -> list[float | None]:
    return [sum(row["memory"].values())] if row["memory"] else [None]


def _inverse(name: str) -> Values:
    """Rates of a loss in seconds a byte; the bounds of its interval change places."""
    return lambda row: [one and 1 / one for one in reversed(_of(name)(row))]


_RUN: dict[str, tuple[Values, tuple[float, ...]]] = {
    "bytes": (_of("bytes"), ()),
    "GiB/s (GB/s)": (lambda row: [row["median_bytes_per_s"]] * 2, _RATE),
    "GiB/s (GB/s) interval": (_of("ci95_bytes_per_s"), (2**30, 2**30)),
    "times": (_of("ratio", "ratio_ci95"), ()),
    "of fio": (_of("of_ceiling"), ()),
    "first done (s)": (_of("first_done_s"), ()),
    "last done (s)": (_of("last_done_s"), ()),
    "CPU s/GiB": (_of("cpu_s_per_gib"), ()),
    "memory": (_memory, ()),
}
_TRAIN: dict[str, tuple[Values, tuple[float, ...]]] = {
    "step": (_of("step_s"), ()),
    "step while persisting": (_of("persisting_step_s", "slowdown"), ()),
    "stall": (_of("stall_s"), ()),
    "least stall": (_of("least_stall_s"), ()),
    "snapshot GiB/s": (_of("snapshot_bytes_per_s"), (2**30,)),
    "persist": (_of("persist_s"), ()),
    "overhead": (_of("overhead"), ()),
    "overhead interval": (_of("overhead_ci95"), ()),
    "peak memory": (_of("peak_memory_bytes"), ()),
    "peak dirty": (_of("peak_dirty_bytes"), ()),
    "committed": (lambda row: [row["committed"], row["saves"]] if row["saves"] else [None], ()),
}
_TUNING: dict[str, tuple[Values, tuple[float, ...]]] = {
    "GiB/s (GB/s)": (lambda row: [1 / row["loss"]] * 2, _RATE),
    "GiB/s (GB/s) interval": (_inverse("loss_ci95"), (2**30, 2**30)),
    "times": (_of("ratio"), ()),
    "times interval": (_of("ratio_ci95"), ()),
    "CPU s/GiB": (_of("cpu_s_per_gib"), ()),
    "memory": (_of("memory_bytes"), ()),
    "samples": (_of("samples"), ()),
}
_KINDS = {
    "iobench.report/1": ("summaries", "label", _RUN),
    "iobench.train/2": ("arms", "label", _TRAIN),
    "iobench.tuning/1": ("confirmed", "setting", _TUNING),
}
"""The list of rows in the JSON document, the name of a row, and what each column has."""

_WORDS = {"", "checkpoints", "operation", "restore as", "same after resume", "same losses"}
_WORDS |= {"setting", "verdict", "writer"}
"""Columns without figures."""


def _columns(header: list[str]) -> Iterator[str]:
    """The keys of columns: an interval belongs to the column before it."""
    before = ""
    for name in header:
        if name.endswith("% interval"):
            yield f"{before} interval"
        else:
            before = "times" if name.startswith("times ") else name
            yield before


def _agrees(cell: str, values: list[float | None], scales: tuple[float, ...]) -> bool:
    """Whether the numbers in a cell are these values, each to the last digit shown."""
    shown = [
        (number.replace(",", ""), unit or mark) for number, unit, mark in _NUMBER.findall(cell)
    ]
    known = [one for one in values if one is not None]
    if len(shown) != len(known):
        return False
    for number, (text, unit) in enumerate(shown):
        scale = scales[number] if scales else _UNITS[unit]
        half = 0.5001 * 10.0 ** -len(text.partition(".")[2])
        if abs(known[number] / scale - float(text)) > half:
            return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("path", _RECORDS, ids=lambda path: path.stem.removeprefix("reference-"))
def test_every_format_has_the_same_numbers(path: Path) -> None:
    """The cells of all tables are in Markdown and on the page, and those of figures in JSON."""
    document = document_of([path])
    markdown, plain = io.StringIO(), io.StringIO()
    render(document, "md", markdown)
    render(document, "json", plain)
    lines = re.sub(r"\\(.)", r"\1", markdown.getvalue())
    shown = re.sub(r"<script.*?</script>", "", page.html(document), flags=re.DOTALL)
    shown = html.unescape(re.sub(r"<[^>]*>", "", shown))
    for grid in (*document.tables, *document.details.tables):
        for cells in grid.rows:
            assert f"| {' | '.join(cells)} |" in lines
            assert "".join(cells) in shown
    data = json.loads(plain.getvalue())
    rows, label, expected = _KINDS[data["schema"]]
    header = [" ".join(one.name.split()) for one in document.tables[0].columns]
    for line in document.tables[0].rows:
        (row,) = _row_of(data[rows], label, header, line)
        for name, cell in zip(_columns(header), line, strict=True):
            if name not in _WORDS:
                values, scales = expected[name]
                assert _agrees(cell, values(row), scales), (line[0], name, cell, values(row))


def _row_of(rows: list[Row], label: str, header: list[str], line: list[str]) -> list[Row]:
    names = dict(zip(header, line, strict=True))
    return [
        row
        for row in rows
        if row[label] == line[0]
        and all(row[key] == names[key] for key in ("operation",) if key in names)
    ]


def test_another_number_is_found() -> None:
    """The check itself can fail: in the last digit, in a unit, and with a number too few."""
    value: list[float | None] = [2.226 * 2**30] * 2
    assert _agrees("2.23 (2.39)", value, _RATE)
    assert not _agrees("2.22 (2.39)", value, _RATE)
    assert not _agrees("2.23", value, _RATE)
    assert _agrees("95.90 ms", [0.0959], ())
    assert not _agrees("95.90 s", [0.0959], ())
    assert not _agrees("-", [0.0959], ())


@pytest.mark.parametrize("path", _RECORDS, ids=lambda path: path.stem)
def test_csv_has_the_rows_of_the_json(path: Path) -> None:
    """Every figure of a row, and both ends of an interval."""
    document = document_of([path])
    rendered = io.StringIO()
    render(document, "csv", rendered)
    rows = list(csv.DictReader(io.StringIO(rendered.getvalue())))
    own = json.loads(json.dumps(document.data[document.rows]))
    assert len(rows) == len(own)
    for row, values in zip(rows, own, strict=True):
        for name, value in values.items():
            if isinstance(value, float):
                assert float(row[name]) == value
            elif "ci95" in name and value:
                assert [float(row[f"{name}.low"]), float(row[f"{name}.high"])] == value
