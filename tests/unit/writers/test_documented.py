"""docs/writers.md: the example passes the conformance suite, and the page names every export."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import iobench
import iobench.writers
from iobench.writers.base import Writer

_PAGE = (Path(__file__).parents[3] / "docs" / "writers.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", _PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_the_example_is_a_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found by the entry point that the page shows, and passes the suite as the page runs it.

    With smaller blocks, so that the files of the suite have several.
    """
    module_text, checked = _blocks("python")
    (registered,) = _blocks("toml")
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "dsync.py").write_text(module_text)
    monkeypatch.syspath_prepend(tmp_path)
    entry = tomllib.loads(registered)["project"]["entry-points"]["iobench.writers"]["dsync"]
    module, _, name = entry.partition(":")
    writer = getattr(importlib.import_module(module), name)
    assert writer.name == "dsync"
    for imported in (module, module.partition(".")[0]):
        del sys.modules[imported]
    made: list[Writer] = []

    def make(**options: Any) -> Writer:
        made.append(writer(block_size="64KiB", **options))
        return made[-1]

    assert "/mnt/scratch" in checked
    exec(checked.replace("/mnt/scratch", str(tmp_path / "target")), {"DsyncWriter": make})
    assert {one.options.threads for one in made} == {3}


def test_the_options_of_each_writer() -> None:
    """Their names and defaults in docs/writers-in-your-framework.md; those of S3 are in s3.md."""
    page = (Path(__file__).parents[3] / "docs" / "writers-in-your-framework.md").read_text()
    table = page.partition("## Does it work")[0]
    found = re.findall(r"^\| `(\w+)`, `(\w+)` \| .*? \| (.*) \|$", table, re.MULTILINE)
    classes = {one for one in iobench.writers.__all__ if one.endswith("Writer")}
    assert {name for _, name, _ in found} == classes - {"Writer", "PosixWriter"}
    assert all(getattr(iobench.writers, name).name == short for short, name, _ in found)
    rows = {name: row for _, name, row in found if name != "S3Writer"}
    for name, row in rows.items():
        options = getattr(iobench.writers, name)().options.describe()
        assert row == ", ".join(f"`{one.name}` ({one.show(one.default)})" for one in options)


def test_the_page_names_every_export() -> None:
    """The table of names is `iobench.writers.__all__`, and each of them resolves."""
    table = _PAGE.partition("## The names")[2]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in row.split(", ")}
    assert {name.strip("`") for name in named} == {*iobench.writers.__all__}
    assert iobench.writers.__all__ == sorted(iobench.writers.__all__)
    for name in dir(iobench.writers):
        assert getattr(iobench.writers, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = iobench.writers.nothing
