"""README.md and docs/: tables and outputs match their records; results/ is small."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from iobench.errors import ResultFileError
from iobench.units import MIB

_ROOT = Path(__file__).parents[2]
_PERFORMANCE = _ROOT / "docs" / "performance.md"


def _script(name: str) -> ModuleType:
    """A module of benchmarks/, whose scripts import one another by their bare names."""
    if name not in sys.modules:
        found = importlib.util.spec_from_file_location(name, _ROOT / "benchmarks" / f"{name}.py")
        assert found is not None
        assert found.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(found)
        found.loader.exec_module(sys.modules[name])
    return sys.modules[name]


_arms, _api_pages, _tables = _script("arms"), _script("api_pages"), _script("tables")
_PAGES = [page for page in _tables.PAGES if _tables.BLOCK.search(page.read_text())]


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_their_records(page: Path) -> None:
    """`python benchmarks/tables.py` would change nothing."""
    assert page.read_text() == _tables.rendered(page)


def _words(picture: Path) -> list[str]:
    """The text of an SVG, and the labels of its marks for screen readers. Positions may differ by
    the fonts of a machine."""
    return re.findall(r'<text[^>]*>([^<]*)<|aria-label="([^"]*)"', picture.read_text())


def test_pictures_are_those_of_their_commands(tmp_path: Path) -> None:
    """Texts, labels and numbers are equal; and the picture has the medians of the record."""
    drawn = _tables.draw(tmp_path)
    assert drawn
    for name in drawn:
        assert _words(tmp_path / name) == _words(_ROOT / name)
        dark = name.with_stem(f"{name.stem}-dark")
        assert _words(_ROOT / dark) == _words(_ROOT / name)
        assert '"#ffffff"' in (_ROOT / name).read_text()
        assert '"#ffffff"' not in (_ROOT / dark).read_text()
        shown = {text for text, _ in _words(_ROOT / name)}
        assert len([one for one in shown if one.endswith(" GiB/s")]) >= 3


def test_performance_is_read_in_two_minutes() -> None:
    """No long lines, and no bullet of more than three. A table written by hand has no record, and
    would not be checked."""
    text = _PERFORMANCE.read_text()
    assert not [line for line in text.splitlines() if len(line) > 120]
    assert not re.findall(r"^- .*\n(?:  .*\n){3,}", text, re.MULTILINE)
    assert "| ---" in text
    assert not [line for line in _tables.BLOCK.sub("", text).splitlines() if line.startswith("|")]


@pytest.mark.parametrize(
    "page",
    [one for one in sorted((_ROOT / "docs").glob("*.md")) if one.stem != "architecture"],
    ids=lambda page: page.name,
)
def test_lines_fit_a_terminal(page: Path) -> None:
    """Text and commands; rows of tables and outputs may be longer."""
    text = re.sub(r"^<!-- \w+: .*?^<!-- end -->$", "", page.read_text(), flags=re.DOTALL | re.M)
    lines = text.splitlines()
    assert not [line for line in lines if len(line) > 120 and not line.startswith("|")]


def test_troubleshooting_quotes_the_verdicts() -> None:
    """Each reason of its first table is one that the code gives."""
    page = (_ROOT / "docs" / "troubleshooting.md").read_text()
    table = page.partition("## INVALID")[2].partition("## ")[0]
    reasons = re.findall(r"^\| (?!reason|---)(.*?) \|", table, re.MULTILINE)
    assert len(reasons) > 5
    code = (_ROOT / "iobench" / "bench" / "judging" / "verdict.py").read_text()
    code = code.replace("{_percent(RESIDENT_LIMIT)}", "1%")
    assert not [one for one in reasons if one.removeprefix("the bytes ") not in code]


def test_the_repository_is_small() -> None:
    """README.md has what the project is, how to start, and links. Everyone who clones the
    repository downloads the records."""
    assert len((_ROOT / "README.md").read_text().splitlines()) <= 100
    assert sum(path.stat().st_size for path in _published(_ROOT)) < 3.5 * MIB


def _published(checkout: Path) -> list[Path]:
    """The records below results/ that git tracks. `iobench run` writes others next to them."""
    if not shutil.which("git"):
        pytest.skip("git is not installed")
    command = ["git", "-C", checkout, "ls-files", "-z", "--", "results/*.jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    names = done.stdout.split("\0")[:-1]
    if not names:
        pytest.skip(f"git tracks no records here: {done.stderr.strip() or 'not a checkout'}")
    return [checkout / name for name in names]


def test_a_benchmark_record_becomes_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every sample counts: the median, the slowest and fastest round, by operation."""
    path = tmp_path / "drain.jsonl"
    monkeypatch.setattr(
        sys, "argv", ["benchmarks/drain.py", "--rounds", "3", "--record", str(path)]
    )
    with _arms.Record(path, target=tmp_path) as samples:
        for turn, seconds in enumerate((1.0, 4.0, 2.0)):
            samples.sample("save stock", turn, 2 * seconds, bytes=2**30, cpu_s=0.5)
            samples.sample("save ours", turn, seconds, bytes=2**30, cpu_s=0.25)
        samples.sample("load ours", 0, 0.5, bytes=2**30, cpu_s=0.25)
    monkeypatch.setattr(sys, "argv", ["tables.py", str(path)])
    _tables.main()
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("|")] == [
        "| arm | rate | slowest - fastest | median time | rounds | CPU s/GiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| load ours | 2.00 GiB/s | 2.00 - 2.00 | 0.500 s | 1 | 0.25 |",
        "| save ours | 0.50 GiB/s | 0.25 - 1.00 | 2.000 s | 3 | 0.25 |",
        "| save stock | 0.25 GiB/s | 0.12 - 0.50 | 4.000 s | 3 | 0.50 |",
    ]
    assert "python benchmarks/drain.py --rounds 3\n" in out


def test_a_table_of_costs_per_tensor() -> None:
    """Medians per tensor, for samples that count tensors."""
    samples = [
        {"elapsed_s": seconds, "bytes": 2**30, "tensors": 1000, "cpu_s": 0.5, "caller_cpu_s": 0.25}
        for seconds in (1.0, 2.0, 9.0)
    ]
    head, _, row = _arms.table({"save ours, 1000": samples}).splitlines()
    assert head.endswith("| rounds | us/tensor | CPU us/tensor | CPU us/tensor, caller |")
    assert row.endswith("| 2.000 s | 3 | 2000.0 | 500.0 | 250.0 |")


def test_records_are_not_overwritten(tmp_path: Path) -> None:
    """A record is evidence: an older one stays. The option is optional."""
    path = tmp_path / "old.jsonl"
    path.write_text("old")
    with pytest.raises(ResultFileError, match="exists and is not overwritten"):
        _arms.Record(path, target=tmp_path)
    with _arms.Record(None, target=tmp_path) as samples:
        samples.sample("arm", 0, 1.0)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_of_another_schema_is_refused() -> None:
    """A record of `iobench run` is not one of a script."""
    with pytest.raises(ResultFileError, match="an iobench result file, not a record of a script"):
        _arms.read(_ROOT / "results" / "reference-aa-llama7b.jsonl")


def test_a_name_of_the_api_that_is_not_there() -> None:
    """What is there is in the pages of docs/api/, which are made again above."""
    with pytest.raises(LookupError, match=r"iobench\.units does not define or import other"):
        _api_pages._find("iobench.units", "other")
