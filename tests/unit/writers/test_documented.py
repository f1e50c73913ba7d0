"""docs/writers.md: the example passes the conformance suite, and the page names every export."""

from __future__ import annotations

import functools
import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest

import iobench
import iobench.writers

_PAGE = (Path(__file__).parents[3] / "docs" / "writers.md").read_text()


def _block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", _PAGE, re.DOTALL | re.MULTILINE)
    return str(found)


@pytest.mark.slow
def test_the_example_is_a_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found by the entry point that the page shows, and every check holds for it."""
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "dsync.py").write_text(_block("python"))
    monkeypatch.syspath_prepend(tmp_path)
    entry = tomllib.loads(_block("toml"))["project"]["entry-points"]["iobench.writers"]["dsync"]
    module, _, name = entry.partition(":")
    writer = getattr(importlib.import_module(module), name)
    assert writer.name == "dsync"
    for imported in (module, module.partition(".")[0]):
        del sys.modules[imported]
    make = functools.partial(writer, block_size="64KiB", threads=3)
    iobench.testing.check_writer(make, tmp_path / "target")


def test_the_page_names_every_export() -> None:
    """The table of names is `iobench.writers.__all__`, and each of them resolves."""
    table = _PAGE.partition("## The names")[2]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in row.split(", ")}
    assert {name.strip("`") for name in named} == {*iobench.writers.__all__}
    assert iobench.writers.__all__ == sorted(iobench.writers.__all__)
    for name in dir(iobench.writers):
        assert getattr(iobench.writers, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = iobench.writers.nothing  # type: ignore[attr-defined]
