"""`iobench show --series` draws the counted bytes, from the start of the clock to its end."""

from __future__ import annotations

import io
from dataclasses import replace

from support.cli import app
from typer.testing import CliRunner

from iobench.errors import UsageError
from iobench.report.series import bars, write
from iobench.results import ResultFile, Series


def drawn(result: ResultFile) -> list[str]:
    stream = io.StringIO()
    write(result, stream)
    return stream.getvalue().splitlines()


def with_series(example: ResultFile, completed: tuple[int, ...] | None) -> ResultFile:
    series = Series(
        interval_s=0.1, completed=completed, counter="device", counted=(0, 2**20, 2**20)
    )
    return replace(example, samples=(replace(example.samples[0], elapsed_s=0.26, series=series),))


def test_bars_are_parts_of_the_highest() -> None:
    assert bars([0, 1, 50, 100]) == "·▁▅█"
    assert bars([0, 0]) == "··"


def test_a_sample_has_a_line_for_each_way_of_counting(example: ResultFile) -> None:
    lines = drawn(with_series(example, (2**20, 2**20, 0)))
    sample = example.samples[0]
    assert lines[0] == f"{sample.writer} {sample.operation} {sample.repetition + 1}: 260 ms"
    # The last interval lasts 0.06 s: as many bytes there are a higher rate.
    assert lines[1].startswith("  completed ██· 100 ms each, up to 10.00 MiB/s")
    assert lines[2].startswith("  device    ·▅█ 100 ms each, up to 16.67 MiB/s")


def test_a_contender_that_does_not_count_itself_has_the_device(example: ResultFile) -> None:
    assert [line.split()[0] for line in drawn(with_series(example, None))[1:]] == ["device"]


def test_a_long_series_fits_a_line(example: ResultFile) -> None:
    result = with_series(example, (2**20,) * 950)
    result = replace(result, samples=(replace(result.samples[0], elapsed_s=95.0),))
    assert "█" * 95 + " 1 s each" in drawn(result)[1]


def test_old_records_say_that_they_have_none(example: ResultFile) -> None:
    assert drawn(example) == ["no series: recorded before iobench kept them"]


def test_series_are_for_people(example_path: object) -> None:
    answer = CliRunner().invoke(app, ["show", str(example_path), "--series", "--format", "json"])
    assert isinstance(answer.exception, UsageError)
