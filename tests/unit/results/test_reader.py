"""A result file is read whole, or refused in one line with the place and the remedy."""

import contextlib
import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iobench.errors import ResultFileError
from iobench.report.render import render
from iobench.report.run import report_document
from iobench.report.summary import summarise
from iobench.results import ResultFile, read

EXAMPLE = Path(__file__).with_name("example.jsonl").read_bytes()
LINES = EXAMPLE.splitlines(keepends=True)


def refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(ResultFileError) as caught:
        read(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def test_the_first_schema_loads(example: ResultFile) -> None:
    assert example.run.workload.name == "llama7b"
    assert example.run.environment.storage.fs_type == "ext4"
    assert len(example.samples) == 12
    assert len(example.ceiling) == 6
    assert example.end is not None
    assert example.incomplete is None
    first = example.samples[0]
    assert (first.writer, first.operation, first.bytes) == ("odirect", "save", 2**30)
    assert first.paths["direct"].operations == 64


def test_a_killed_run_loads_and_says_so(path: Path) -> None:
    path.write_bytes(b"".join(LINES[:5]))
    result = read(path)
    assert result.end is None
    assert len(result.samples) == 2
    assert result.incomplete == (
        f"{path} has no end: the run was killed or is still running; 2 samples were recorded"
    )


def test_missing_file(path: Path) -> None:
    with pytest.raises(
        ResultFileError, match=r"run\.jsonl: no such file; iobench writes its records"
    ):
        read(path)


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ResultFileError, match="is a directory; give a result file"):
        read(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\n", b"  \n\n"])
def test_empty_file(path: Path, content: bytes) -> None:
    assert "is empty" in refusal(path, content)


@pytest.mark.parametrize(
    "content",
    [b"hello\n", b"{\n}\n", b"\x89PNG\r\n", b"\x00" * 4096, b"[" * 100_000, b'{"schema": "iob'],
)
def test_not_json(path: Path, content: bytes) -> None:
    assert refusal(path, content).startswith(
        ", line 1: not JSON; give a .jsonl file that iobench wrote"
    )


@pytest.mark.parametrize("content", [b"{}", b"3\n", b'{"schema": "other/1"}\n', b"null"])
def test_foreign_json(path: Path, content: bytes) -> None:
    assert refusal(path, content) == ", line 1: not a record of an iobench result file"


def test_a_journal_of_autotune_is_named(path: Path) -> None:
    """It is stored next to result files, under results/."""
    message = refusal(path, b'{"schema": "iobench.tune/1", "kind": "tuning"}\n')
    assert message.startswith(" is a journal of iobench autotune, not an iobench result file; ")
    assert message.endswith(f"iobench autotune --resume {path} continues it")


def test_a_record_of_a_benchmark_is_named(path: Path) -> None:
    """The repository has some next to its result files, under results/benchmarks."""
    message = refusal(path, b'{"schema": "iobench.benchmark/1", "kind": "benchmark"}\n')
    assert message == (
        " is a record of a script in benchmarks/, not an iobench result file; "
        f"python benchmarks/tables.py {path} prints its table"
    )


def test_a_newer_schema_says_to_upgrade(path: Path) -> None:
    message = refusal(path, EXAMPLE.replace(b"iobench.result/1", b"iobench.result/2"))
    assert message == (
        ", line 1: written by a newer iobench (schema iobench.result/2); upgrade iobench to read it"
    )


def test_a_record_before_the_header(path: Path) -> None:
    assert refusal(path, b"".join(LINES[1:])).startswith(", line 1: the run header is missing")


def test_two_runs_in_one_file(path: Path) -> None:
    assert ", line 21: a record after the end" in refusal(path, EXAMPLE + LINES[3])
    assert ", line 6: a second run begins" in refusal(path, b"".join(LINES[:5]) + EXAMPLE)


def test_a_record_of_another_run(path: Path) -> None:
    other = LINES[3].replace(b"0f3a5c7e9b1d2f46", b"ffffffffffffffff")
    assert refusal(path, LINES[0] + other) == (
        ", line 2: belongs to run ffffffffffffffff, not to 0f3a5c7e9b1d2f46"
    )


def test_a_cut_last_line_says_how_to_go_on(path: Path) -> None:
    message = refusal(path, b"".join(LINES[:5]) + LINES[5][:40])
    assert message == (
        ", line 6: cut short, as when a run is killed; "
        f"to read the lines before it: sed -i '$d' {path}"
    )


def test_damage_in_the_middle(path: Path) -> None:
    broken = b"".join([*LINES[:4], LINES[4][:40] + b"\n", *LINES[5:]])
    assert ", line 5: damaged, not JSON" in refusal(path, broken)


def test_a_removed_sample_is_noticed(path: Path) -> None:
    assert "the run wrote 12 samples and 11 are here" in refusal(
        path, b"".join([*LINES[:4], *LINES[5:]])
    )


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "9" * 400, "9" * 5000])
def test_numbers_that_are_no_figures_are_damage(path: Path, number: str) -> None:
    values = json.loads(LINES[0]) | {"plan": {"x": "HERE"}}
    line = json.dumps(values).replace('"HERE"', number)
    assert ", line 1: not JSON" in refusal(path, line.encode() + b"\n")


def test_wrong_values_name_line_and_field(path: Path) -> None:
    broken = LINES[0] + LINES[3].replace(b'"retries": 0', b'"retries": "none"')
    assert refusal(path, broken) == ", line 2: Expected `int`, got `str` - at `$.retries`"


@pytest.mark.slow
def test_cut_at_every_byte_it_loads_fewer_records_or_is_refused(path: Path) -> None:
    lines = [LINES[0], LINES[1], LINES[3], LINES[-1].replace(b'"samples": 12', b'"samples": 1')]
    whole, loaded = b"".join(lines), set()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        try:
            result = read(path)
        except ResultFileError:
            continue
        count = len(result.samples) + len(result.ceiling) + 1 + (result.end is not None)
        assert whole[:cut].strip() == b"".join(lines[:count]).strip()
        loaded.add(count)
    assert loaded == {1, 2, 3, 4}


@settings(max_examples=200)
@given(st.integers(0, len(EXAMPLE) - 1), st.binary(min_size=1, max_size=8))
def test_damaged_anywhere_it_loads_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, at: int, damage: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.jsonl"
    path.write_bytes(EXAMPLE[:at] + damage + EXAMPLE[at + len(damage) :])
    with contextlib.suppress(ResultFileError):
        result = read(path)
        assert len(result.samples) <= 12
        render(report_document(summarise(result)), "table", io.StringIO())
