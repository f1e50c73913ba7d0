"""`iobench show --plot` draws every sample, median, interval and fio's rate in 80 columns."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.cli import app
from support.terminal import Terminal, without_styles
from typer.testing import CliRunner

from iobench.errors import UsageError
from iobench.report.plot import write
from iobench.report.summary import summarise
from iobench.results import ResultFile, read
from iobench.results.setting import Setting

_TRAINED = Path(__file__).parents[3] / "results" / "reference-train-gpt5b-nemo.jsonl"
_ROW = re.compile(r"^(?P<label>.{0,24}?)  (?P<cells>[ •\d#┊→]*)  +(?P<median>\d+\.\d\d)$")


def drawn(result: ResultFile, stream: io.StringIO | None = None) -> list[str]:
    stream = stream or io.StringIO()
    write(result, stream)
    return without_styles(stream.getvalue()).splitlines()


def counted(cells: str) -> int:
    """The samples that a line of dots shows."""
    digits = [int(one) for one in cells if one.isdigit()]
    return cells.count("•") + sum(digits)


def rows(lines: Sequence[str]) -> Iterator[tuple[str, int, float]]:
    """Label, number of samples and median of each row."""
    for line in lines:
        if found := _ROW.match(line):
            yield found["label"].strip(), counted(found["cells"]), float(found["median"])


def with_rates(example: ResultFile, rates: dict[str, Sequence[float]]) -> ResultFile:
    """The example with one save and one restore per figure, in GiB/s, by writer."""
    kinds = {one.operation: one for one in example.samples}
    samples = [
        replace(
            kind,
            setting=Setting(writer=writer, options={}, axes=kind.axes),
            repetition=repetition,
            elapsed_s=kind.bytes / (rate * 2**30),
        )
        for writer, given in rates.items()
        for repetition, rate in enumerate(given)
        for kind in (kinds["save"], kinds["restore"])
    ]
    return replace(example, samples=tuple(samples))


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("contenders", [1, 20])
def test_every_sample_is_drawn_in_80_columns(example: ResultFile, contenders: int) -> None:
    """The rows are those of the report, fastest first, with as many dots as samples."""
    rates = {f"writer{chr(97 + n)}": [1.0 + n / 10, 1.5, 1.51, 2.0] for n in range(contenders)}
    result = with_rates(example, rates)
    lines = drawn(result, Terminal())
    assert max(map(len, lines)) <= 80
    expected = [
        (one.label, 4, round(one.median_bytes_per_s / 2**30, 2))
        for one in summarise(result).summaries
    ]
    assert list(rows(lines)) == expected
    assert len(expected) == 2 * contenders


@pytest.mark.usefixtures("terminal")
def test_marks_are_at_their_rates(example: ResultFile) -> None:
    """The axis begins at 0; the interval ends at its outer samples; fio has its own column."""
    lines = drawn(with_rates(example, {"odirect": [0.5, 1.0, 1.0, 1.0, 2.0]}), Terminal())
    title, axis, dots, spread = lines[2:6]
    begin = axis.index("0")
    zero_to_two = axis.index("2.0") - begin
    at = {
        mark: line.index(mark) - begin
        for mark, line in zip("•3┊", (dots, dots, title), strict=True)
    }
    assert at["3"] == pytest.approx(zero_to_two / 2, abs=1)
    assert at["•"] == pytest.approx(zero_to_two / 4, abs=1)
    ceiling = summarise(example).ceiling.save_bytes_per_s
    assert ceiling is not None
    assert at["┊"] == pytest.approx(ceiling / 2**30 * zero_to_two / 2, abs=1)
    assert f"fio {ceiling / 2**30:.2f} ┊" in title
    assert spread.index("├") == dots.index("•")
    assert spread.index("┼") == dots.index("3")
    assert spread.index("┤") == dots.rindex("•")
    assert spread.endswith(" 0.50-2.00")


def test_ten_samples_in_one_place_and_a_long_label(example: ResultFile) -> None:
    """They have a mark of their own, which the legend explains; no name is cut."""
    name = "a-writer-with-a-name-that-is-longer-than-any-column"
    lines = drawn(with_rates(example, {name: [1.0] * 10, "odirect": [2.0]}))
    assert name in lines
    assert "#" in lines[lines.index(name) + 1]
    assert "# ten or more" in lines[-1]


def test_a_row_that_does_not_count_does_not_widen_the_axis(example: ResultFile) -> None:
    """It has its verdict in place of the interval, and an arrow at the end of the axis."""
    result = with_rates(example, {"odirect": [1.0, 1.1], "null": [90.0, 100.0]})
    samples = [replace(one, stores=one.writer != "null") for one in result.samples]
    lines = drawn(replace(result, samples=tuple(samples)))
    row = next(line for line in lines if line.startswith("null"))
    assert "→" in row
    assert lines[lines.index(row) + 1].endswith("INVALID")
    assert "→ beyond the axis" in lines[-1]
    assert re.search(r"\b1\.0", lines[3])


def test_a_terminal_without_unicode_gets_ascii(example: ResultFile) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    write(example, stream)
    stream.seek(0)
    shown = stream.read()
    assert shown.isascii()
    assert "o one sample" in shown
    assert "[" in shown


def test_colours_are_those_of_the_report_and_can_be_switched_off(
    example: ResultFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured, plain = Terminal(), Terminal()
    write(example, coloured)
    assert "\x1b[38;" in coloured.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    write(example, plain)
    assert "\x1b[38;" not in plain.getvalue()
    assert without_styles(plain.getvalue()) == without_styles(coloured.getvalue())


def test_nothing_measured_is_said(example: ResultFile) -> None:
    assert drawn(replace(example, samples=()))[-1] == "nothing was measured"


@pytest.mark.parametrize(
    "options", [["--format", "json"], ["--details"], ["--series"], [str(_TRAINED)]]
)
def test_what_cannot_be_drawn_is_refused(example_path: Path, options: list[str]) -> None:
    """Also a record of training, which has no rates."""
    path = [] if options == [str(_TRAINED)] else [str(example_path)]
    answer = CliRunner().invoke(app, ["show", "--plot", *path, *options])
    assert isinstance(answer.exception, UsageError)


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("name", ["llama7b", "numjobs-llama7b-zero3"])
def test_a_real_record_has_all_its_samples(name: str) -> None:
    result = read(_TRAINED.with_name(f"reference-{name}.jsonl"))
    lines = drawn(result, Terminal())
    assert sum(count for _, count, _ in rows(lines)) == len(result.samples)
    assert max(map(len, lines)) <= 80
