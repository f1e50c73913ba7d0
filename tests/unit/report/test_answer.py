"""The answer at the top of a report: which path is fastest, by how much, what to do next, how
sure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.terminal import Terminal, without_styles

from iobench.report.answer import answer
from iobench.report.render import render
from iobench.report.run import report_document
from iobench.report.summary import Report, summarise
from iobench.results import ResultFile, read, to_plain
from iobench.results.records import BackgroundRestores, Series
from iobench.units import GIB, duration_form

REFERENCE = read(Path(__file__).parents[1] / "results" / "recorded.jsonl")


def of(seconds: dict[str, Sequence[float]], **changes: object) -> ResultFile:
    """The recorded run with saves of these durations, each verified by a recorded restore."""
    proof = next(s.verified for s in REFERENCE.samples if s.operation == "restore")
    samples = []
    for writer, times in seconds.items():
        found = [s for s in REFERENCE.samples if (s.writer, s.operation) == (writer, "save")]
        samples += [
            replace(s, elapsed_s=t, phases_s={}, verified=proof)
            for s, t in zip(found, times, strict=False)
        ]
    return replace(REFERENCE, samples=tuple(samples), **changes)


def said(report: Report) -> dict[str, tuple[str, ...]]:
    return {line.subject: line.texts for line in answer(report)}


def test_the_recorded_run_is_answered_in_its_first_lines(terminal: Terminal) -> None:
    """At 80 columns: the fastest paths, their lead with its interval, and the next command."""
    report = replace(summarise(REFERENCE), target=str(Path.cwd()))
    render(report_document(report), "table", terminal)
    shown = without_styles(terminal.getvalue()).splitlines()
    assert shown[:8] == [
        "Save:    no winner: 2 of 3 cannot be told apart (odirect or uncached), odirect",
        "         4.3x faster than buffered (4.2x to 4.3x), 67% of fio",
        "         75.31 GiB: 58.9 s instead of 4 min 15 s, extrapolated from 1.50 GiB",
        "Restore: odirect, 1.09x faster than buffered (1.04x to 1.15x), 107% of fio",
        "         (fio's buffers are in small pages; the data repeat; the host may cache",
        "         what was saved)",
        "         75.31 GiB: 42.5 s instead of 46.6 s, extrapolated from 1.50 GiB",
        "Next:    iobench autotune llama7b",
    ]


def test_a_winner_is_compared_with_what_it_beats() -> None:
    """With `buffered` if that is slower, otherwise with none. The document has names and ratio."""
    report = summarise(of({"odirect": [1.0] * 5, "uncached": [4.0] * 5, "buffered": [2.0] * 5}))
    assert said(report)["Save"][0].startswith("odirect, 2.0x faster than buffered")
    (winner,) = to_plain(report)["winners"]
    assert (winner["fastest"], winner["equals"], winner["reference"]) == ("odirect", [], "buffered")
    assert winner["ratio"] == pytest.approx(2.0)
    report = summarise(of({"odirect": [2.0] * 5, "uncached": [30.0] * 5, "buffered": [1.0] * 5}))
    (winner,) = to_plain(report)["winners"]
    assert (winner["fastest"], winner["ratio"]) == ("buffered", None)
    assert said(report)["Save"][0].startswith("buffered at ")
    assert "faster" not in said(report)["Save"][0]


def test_times_of_other_numbers_of_processes_are_not_compared() -> None:
    """Four processes save four times the bytes: in more time, at a higher rate."""
    path = Path(__file__).parents[3] / "results" / "reference-numjobs-llama7b-zero3.jsonl"
    lines = said(summarise(read(path)))["Save"]
    assert re.fullmatch(
        r"[0-9.]+ GiB: .*, extrapolated from [0-9.]+ [GM]iB(, not steady)?", lines[1]
    )
    assert " instead of " not in lines[1]


def test_what_a_background_gets_and_what_it_leaves() -> None:
    """Each row has its own line. The winner is that of the operations alone."""
    result = of({"odirect": [1.0] * 5, "buffered": [2.0] * 5})
    beside = BackgroundRestores(
        writer="odirect",
        restores=1,
        bytes=2 * GIB,
        lead_s=0.1,
        lag_s=0.1,
        reading_s=4.0,
        resident_fraction=0.0,
        from_storage=1.0,
        mismatches=0,
    )
    next_to = tuple(
        replace(
            one,
            setting=one.setting.at(background="restore"),
            elapsed_s=4.0,
            background_restores=beside,
        )
        for one in result.samples
    )
    both = replace(result, samples=result.samples + next_to)
    report = summarise(both)
    lines = said(report)
    assert lines["Save"][0].startswith("odirect, 2.0x faster than buffered")
    own = result.samples[0].bytes / 4 / GIB
    assert set(lines["Background"]) == {
        f"{writer} saves at {own:.2f} GiB/s while another process restores at 0.50 GiB/s, and "
        f"keeps {part}% of its rate alone ({part}% to {part}%)"
        for writer, part in (("odirect", 25), ("buffered", 50))
    }
    assert [one.background for one in report.winners] == [None, "restore"]
    alone = summarise(replace(both, samples=next_to))
    assert said(alone)["Save"][0].startswith("odirect background=restore or ")
    assert all("keeps" not in text for text in said(alone)["Background"])
    assert "Background" not in said(summarise(result))
    few = tuple(one for one in both.samples if one.repetition < 3)
    assert all(
        text.endswith("% of its rate alone")  # no interval by so few
        for text in said(summarise(replace(both, samples=few)))["Background"]
    )


def test_few_samples_name_no_winner() -> None:
    """However large the difference is. The next command repeats the run."""
    report = summarise(of({"odirect": [1.0] * 3, "buffered": [9.0] * 3}))
    lines = said(report)
    assert lines["Save"][0].startswith("3 samples cannot name a winner; highest median: odirect at")
    assert "faster" not in str(lines)
    assert any("--repeat 6" in text for text in said(replace(report, target="/mnt"))["Next"])


def test_invalid_figures_are_named_and_not_counted() -> None:
    result = of({"odirect": [1.0] * 5, "buffered": [9.0] * 5})
    wrong = tuple(
        replace(s, bytes=s.bytes - 1) if s.writer == "odirect" else s for s in result.samples
    )
    lines = said(summarise(replace(result, samples=wrong)))["Save"]
    assert lines[0].startswith("buffered at ")
    assert lines[-1] == "not counted: odirect (INVALID)"
    alone = tuple(s for s in wrong if s.writer == "odirect")
    assert said(summarise(replace(result, samples=alone)))["Save"] == (
        "no valid figure: odirect is INVALID",
    )


def test_noise_says_how_many_series_move_and_what_to_do() -> None:
    report = summarise(of({"odirect": [1.0, 2.0, 1.0, 2.0, 3.0], "buffered": [9.0] * 5}))
    assert said(report)["Noise"] == (
        "1 of 2 series is not steady: let the storage rest, or find the rate that lasts by "
        "--until steady, not more repetitions",
    )
    assert "Noise" not in said(summarise(of({"odirect": [1.0] * 5, "buffered": [9.0] * 5})))


def test_a_run_that_stopped_says_so() -> None:
    """First of all, as the record says it."""
    killed = replace(of({"odirect": [1.0] * 3, "buffered": [2.0] * 2}), end=None)
    assert next(iter(said(summarise(killed)).items())) == ("Stopped", (killed.incomplete,))
    assert "5 samples were recorded" in str(killed.incomplete)
    assert "Stopped" not in said(summarise(REFERENCE))


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        ([58.9, 253.94], ["58.9 s", "253.9 s"]),
        ([0.0123, 0.5], ["12.3 ms", "500.0 ms"]),
        ([300.0, 7000.0], ["5.00 min", "116.67 min"]),
        ([0.5, 20_000.0], ["0.01 min", "333.33 min"]),
        ([9000.0], ["2.50 h"]),
        ([], []),
    ],
)
def test_durations_of_a_column_have_one_form(seconds: list[float], shown: list[str]) -> None:
    form = duration_form(seconds)
    assert [form(value) for value in seconds] == shown


def test_the_terminal_says_that_data_repeat(terminal: Terminal) -> None:
    """Every reader sees it: without unique bytes, storage shows other rates."""
    run = REFERENCE.run
    plan = {**run.plan, "pool_bytes": run.workload.bytes // 4, "numjobs": [1]}
    report = summarise(replace(REFERENCE, run=replace(run, plan=plan)))
    render(report_document(report), "table", terminal)
    assert "data repeats every" in terminal.getvalue()


@pytest.mark.parametrize(("counted", "shown"), [((0, 0, 0, 9, 9), True), ((9, 9, 9, 9, 0), False)])
def test_a_writer_that_leaves_the_device_idle(counted: tuple[int, ...], shown: bool) -> None:
    """What limits the one that the winner is compared with is said; it may not be the device."""
    result = of({"odirect": [1.0] * 5, "buffered": [4.0] * 5})
    series = Series(interval_s=0.1, completed=None, counter="device", counted=counted)
    samples = tuple(
        replace(one, series=series) if one.writer == "buffered" else one for one in result.samples
    )
    report = summarise(replace(result, samples=samples))
    (row,) = [one for one in report.summaries if one.writer == "buffered"]
    assert row.device_idle == counted.count(0) / 5
    texts = said(report)["Save"]
    found = [text for text in texts if text.startswith("buffered: the device was idle 60% of")]
    assert bool(found) is shown
    assert any("faster than buffered" in text for text in texts)
