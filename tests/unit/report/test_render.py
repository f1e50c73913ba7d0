"""All formats have the same content; the table is plain in a pipe and fits a terminal."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.terminal import Terminal, without_styles

from iobench.environment import Machine, Storage
from iobench.report.grid import Column, Grid, Screen
from iobench.report.render import render
from iobench.report.run import report_document
from iobench.report.summary import Report, summarise
from iobench.results import Environment, ResultFile, Sample


def text(
    report: Report,
    name: str = "table",
    stream: io.StringIO | None = None,
    *,
    details: bool = False,
) -> str:
    stream = stream or io.StringIO()
    render(report_document(report), name, stream, details=details)
    return stream.getvalue()


def with_samples(example: ResultFile, samples: Sequence[Sample]) -> Report:
    return summarise(replace(example, samples=tuple(samples)))


@pytest.fixture
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")  # rich takes a dumb terminal for 80 columns wide
    for name in ("FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


def test_the_table_in_a_pipe_is_plain_aligned_and_uncut(
    example: ResultFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    report = replace(summarise(example), record="run.jsonl")
    assert text(report).splitlines() == [
        "Save:    3 samples cannot name a winner; highest median: odirect at 2.00 GiB/s",
        "Restore: 3 samples cannot name a winner; highest median: odirect at 2.50 GiB/s",
        "Next:    iobench plan --results run.jsonl --nodes 1",
        "",
        "llama7b, rank 0: 1.00 GiB of 12.55 GiB in 5 files, serializer=torch",
        "",
        "writer    operation  GiB/s (GB/s)  75% interval  of fio  CPU s/GiB",
        "─" * 66,
        "odirect   save        2.00 (2.15)     1.60-2.50    100%       0.13",
        "buffered  save        1.00 (1.07)     0.80-1.25     50%       0.25",
        "odirect   restore     2.50 (2.68)     2.00-3.12    100%       0.10",
        "buffered  restore     1.25 (1.34)     1.00-1.56     50%       0.20",
        "",
        "-v adds machine, phases and 4 notes",
    ]
    detailed = text(report, details=True).splitlines()
    assert detailed[4:9] == [
        "llama7b, rank 0: 1.00 GiB of 12.55 GiB in 5 files, serializer=torch",
        "node1, Linux 6.1.0-18-amd64, Example CPU, 16 CPUs, 128.00 GiB memory, 1 x Example GPU, "
        "ext4, Example NVMe",
        "",
        "writer    operation  GiB/s (GB/s)  75% interval  of fio  CPU s/GiB",
        "─" * 66,
    ]
    assert detailed[14:18] == [
        "phases",
        "writer    operation  phases (s)",
        "─" * 72,
        "odirect   save       gather 0.125, write 0.250, sync 0.062, commit 0.062",
    ]
    assert detailed[22:-1] == [
        "fio: save 2.00 GiB/s (2.15 GB/s) by io_uring 1MiB x 32",
        "fio: restore 2.50 GiB/s (2.68 GB/s) by io_uring 1MiB x 32",
        "scaled: 2 of 32 layers",
    ]


@pytest.mark.usefixtures("_plain")
@pytest.mark.parametrize("columns", [80, 100, 200])
def test_the_table_fits_a_terminal_and_breaks_no_name(
    example: ResultFile, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """Also with every column that a report can have, and a long setting."""
    monkeypatch.setenv("COLUMNS", str(columns))
    saves = [s for s in example.samples if (s.writer, s.operation) == ("odirect", "save")]
    other = [
        replace(s, setting=replace(s.setting, options={"block_size": 2**20}), bytes=s.bytes - 2**20)
        for s in saves
    ]
    wide = with_samples(example, [*example.samples, *other])
    wide = replace(
        wide,
        summaries=tuple(
            replace(one, ratio=6.2, ratio_ci95=(5.9, 6.5), setting=one.setting.at(numjobs=n))
            for n, one in enumerate(wide.summaries, 1)
        ),
    )
    for shown_report in (summarise(example), wide):
        report = replace(shown_report, record="run.jsonl")
        for details in (False, True):
            shown = without_styles(text(report, stream=Terminal(), details=details))
            assert max(len(line) for line in shown.splitlines()) <= columns
            assert "…" not in shown
            for one in report.summaries:
                assert re.search(rf"^{re.escape(one.label)} +{one.operation} ", shown, re.MULTILINE)
            assert ("gather 0.125" in shown) == details
    assert ("a wider terminal also shows: " in text(wide, stream=Terminal())) == (columns < 200)


def test_a_table_wraps_sentences_first_and_never_a_word() -> None:
    grid = Grid(
        columns=(
            Column("name", figure=False),
            Column("size", drop=1),
            Column("rate\n(GB/s)"),
            Column("why", figure=False, sentence=True),
        ),
        rows=[
            ["a-long-name", "12", "2.50 (2.68)", "the reason is a sentence that needs some room"],
            ["a b", "1", "-", "short"],
        ],
    )

    def lines(width: int) -> list[str]:
        return [*Screen(width=width).table(grid)]

    assert lines(100) == [
        "name         size  rate (GB/s)  why",
        "─" * 77,
        "a-long-name    12  2.50 (2.68)  the reason is a sentence that needs some room",
        "a b             1            -  short",
    ]
    assert lines(52) == [
        "                    rate",
        "name              (GB/s)  why",
        "─" * 52,
        "a-long-name  2.50 (2.68)  the reason is a sentence",
        "                          that needs some room",
        "a b                    -  short",
        "a wider terminal also shows: size",
    ]
    assert lines(30)[:9] == [  # the first column has lines of its own
        "name",
        "         rate",
        "       (GB/s)  why",
        "─" * 30,
        "a-long-name",
        "  2.50 (2.68)  the reason is a",
        "               sentence that",
        "               needs some room",
        "a b",
    ]
    assert max(map(len, lines(10))) == len("  2.50 (2.68)  sentence")


def test_a_long_command_is_continued_with_a_backslash() -> None:
    command = "Next:  iobench plan --results a-long-name.jsonl --nodes 1"
    lines = Screen(width=50).paragraph(command, indent=" " * 7, whole=True)
    assert [*lines] == ["Next:  iobench plan --results a-long-name.jsonl \\", "         --nodes 1"]


def test_columns_that_say_the_same_in_every_row_are_left_out(example: ResultFile) -> None:
    header = text(summarise(example)).splitlines()[6]
    assert "verdict" not in header
    assert "bytes" not in header
    wrong = [replace(s, bytes=s.bytes - 1) if s.writer == "odirect" else s for s in example.samples]
    shown = text(with_samples(example, wrong))
    assert "INVALID" in shown
    assert "not counted: odirect (INVALID)" in shown
    assert re.search(r"^.*bytes.* \[odirect save, odirect restore\]$", shown, re.MULTILINE)


def test_colours_only_in_a_terminal(example: ResultFile, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    wrong = [replace(s, bytes=s.bytes - 1) if s.writer == "odirect" else s for s in example.samples]
    report = with_samples(example, wrong)
    assert "\x1b[1;31m" in text(report, stream=Terminal())
    assert "\x1b" not in text(report)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[1;31m" not in text(report, stream=Terminal())


def test_settings_of_one_writer_are_labelled_by_their_differences(example: ResultFile) -> None:
    saves = [s for s in example.samples if s.writer == "odirect" and s.operation == "save"]
    other = [
        replace(s, setting=replace(s.setting, options={"block_size": 2**20, "threads": 4}))
        for s in saves
    ]
    shown = text(with_samples(example, [*saves, *other]))
    assert "odirect block_size=16MiB  save" in shown
    assert "odirect block_size=1MiB   save" in shown
    assert "threads" not in shown


def test_a_reason_of_some_rows_names_them(example: ResultFile) -> None:
    """Square brackets in it are no markup."""
    samples = [
        replace(s, notes=("[bold]x[/]",)) if s.writer == "odirect" else s for s in example.samples
    ]
    assert "[bold]x[/] [odirect save, odirect restore]\n" in text(
        with_samples(example, samples), details=True
    )


def test_axes_are_named_where_they_differ(example: ResultFile) -> None:
    """Only axes in which the rows of a writer differ. An axis with one value is not named."""
    samples = [
        replace(s, setting=s.setting.at(numjobs=1 + s.repetition % 2, granularity="blob"))
        for s in example.samples
        if s.writer == "odirect"
    ]
    shown = text(with_samples(example, samples))
    assert "odirect numjobs=1  save" in shown
    assert "odirect numjobs=2  restore" in shown
    (heading,) = [line for line in shown.splitlines() if line.startswith("llama7b, rank 0")]
    assert heading.endswith("files, serializer=torch, granularity=blob")
    assert shown.count("blob") == 1


def test_what_was_not_measured_is_said(example: ResultFile) -> None:
    """Of the operations, of fio, and of the machine."""
    run = replace(example.run, environment=Environment(machine=Machine(), storage=Storage()))
    empty = replace(example, samples=(), ceiling=(), run=run)
    shown = text(summarise(empty), details=True)
    assert "nothing was measured" in shown
    assert "fio: not measured (no fio job ran)" in shown
    assert "machine not known" in shown


def test_a_slow_rate_has_two_digits(example: ResultFile) -> None:
    """0.0098 GiB/s, not 0.01: the error would be as large as the answer."""
    slow = [replace(one, elapsed_s=210 * one.elapsed_s) for one in example.samples]
    found = report_document(summarise(replace(example, samples=tuple(slow))))
    (table,) = found.tables
    rates = {cell for row in table.rows for cell in row[2].strip(")").split(" (")}
    assert "0.0095" in rates
    assert not rates & {"0.00", "0.01"}
    assert "0.0095 GiB/s" in found.answer[0].texts[0]


def test_csv_has_a_line_per_summary(example: ResultFile) -> None:
    rows = list(csv.DictReader(io.StringIO(text(summarise(example), "csv"))))
    assert len(rows) == 4
    assert rows[0]["writer"] == "odirect"
    assert rows[0]["options.block_size"] == "16777216"
    assert float(rows[0]["median_bytes_per_s"]) == 2**31
    assert float(rows[0]["ci95_bytes_per_s.low"]) == 2**30 / 0.625
    assert float(rows[0]["phases_s.sync"]) == 0.0625
    assert rows[0]["paths.direct"] == "192"
    assert rows[1]["paths.direct"] == ""
    assert rows[0]["reasons"] == "scaled: 2 of 32 layers"


def test_markdown_is_a_table_and_a_list(example: ResultFile) -> None:
    samples = [replace(s, notes=("a|b",)) for s in example.samples]
    lines = text(with_samples(example, samples), "md").splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 6 + 6
    assert {line.count(" | ") for line in rows[:6]} == {5}
    assert rows[2].startswith("| odirect | save | 2.00 (2.15) | 1.60-2.50 | 100% |")
    assert r"- a\|b" in lines
    assert lines[0] == "**llama7b, rank 0: 1.00 GiB of 12.55 GiB in 5 files, serializer=torch**  "


def test_decisions_are_listed_below_the_table(example: ResultFile) -> None:
    made = {"direct: large": 9, "buffered: small": 2}
    first, *others = example.samples
    report = with_samples(example, [replace(first, decisions=made), *others])
    lines = [line for line in text(report, details=True).splitlines() if " chose " in line]
    assert lines == [
        f"{first.writer} {first.operation} chose direct: large (9), buffered: small (2)"
    ]
