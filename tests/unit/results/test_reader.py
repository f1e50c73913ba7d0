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


def test_no_file(path: Path) -> None:
    for one, why in (
        (path, "no such file; iobench writes its records"),
        (path.parent, "is a directory; give a result file"),
    ):
        with pytest.raises(ResultFileError, match=why):
            read(one)


def _cut(line: bytes) -> bytes:
    return line[:40]


def _with_number(number: str) -> bytes:
    """The header with a number in its plan."""
    values = json.loads(LINES[0]) | {"plan": {"x": "HERE"}}
    return json.dumps(values).replace('"HERE"', number).encode() + b"\n"


_NOT_JSON = ", line 1: not JSON; give a .jsonl file that iobench wrote"
_FOREIGN = ", line 1: not a record of an iobench result file"
_REFUSED: list[tuple[bytes, str]] = [
    *((content, "is empty") for content in (b"", b"\n", b"  \n\n")),
    *((content, _NOT_JSON) for content in (b"hello\n", b"{\n}\n", b"\x89PNG\r\n", b"\x00" * 4096)),
    *((content, _NOT_JSON) for content in (b"[" * 100_000, b'{"schema": "iob')),
    *(
        (_with_number(one), _NOT_JSON)
        for one in ("NaN", "Infinity", "1e999", "9" * 400, "9" * 5000)
    ),
    *((content, _FOREIGN) for content in (b"{}", b"3\n", b'{"schema": "other/1"}\n', b"null")),
    (  # stored next to result files, under results/
        b'{"schema": "iobench.tune/1", "kind": "tuning"}\n',
        " is a journal of iobench autotune, not an iobench result file; iobench show {path} prints "
        "it, and iobench autotune --resume {path} continues it",
    ),
    (  # the repository has some under results/benchmarks
        b'{"schema": "iobench.benchmark/1", "kind": "benchmark"}\n',
        " is a record of a script in benchmarks/, not an iobench result file; "
        "python benchmarks/tables.py {path} prints its table",
    ),
    (
        EXAMPLE.replace(b"iobench.result/1", b"iobench.result/2"),
        ", line 1: written by a newer iobench (schema iobench.result/2); upgrade iobench to "
        "read it",
    ),
    (b"".join(LINES[1:]), ", line 1: the run header is missing"),
    (EXAMPLE + LINES[3], ", line 21: a record after the end"),
    (b"".join(LINES[:5]) + EXAMPLE, ", line 6: a second run begins"),
    (
        LINES[0] + LINES[3].replace(b"0f3a5c7e9b1d2f46", b"ffffffffffffffff"),
        ", line 2: belongs to run ffffffffffffffff, not to 0f3a5c7e9b1d2f46",
    ),
    (
        b"".join(LINES[:5]) + _cut(LINES[5]),
        ", line 6: cut short, as when a run is killed; "
        "to read the lines before it: sed -i '$d' {path}",
    ),
    (
        b"".join([*LINES[:4], _cut(LINES[4]) + b"\n", *LINES[5:]]),
        ", line 5: damaged, not JSON",
    ),
    (b"".join([*LINES[:4], *LINES[5:]]), "the run wrote 12 samples and 11 are here"),
    (
        LINES[0] + LINES[3].replace(b'"retries": 0', b'"retries": "none"'),
        ", line 2: Expected `int`, got `str` - at `$.retries`",
    ),
]
"""The content of a file, and words of the line that refuses it."""


@pytest.mark.parametrize(("content", "words"), _REFUSED, ids=lambda one: str(one[:40]))
def test_what_is_refused(path: Path, content: bytes, words: str) -> None:
    path.write_bytes(content)
    with pytest.raises(ResultFileError) as caught:
        read(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    assert words.replace("{path}", str(path)) in message


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
