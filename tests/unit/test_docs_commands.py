"""README.md and docs/: every command line in a code block is one that iobench understands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from iobench.cli.main import app

_ROOT = Path(__file__).parents[2]
_PAGES = [_ROOT / "README.md", _ROOT / "CONTRIBUTING.md", *sorted((_ROOT / "docs").rglob("*.md"))]
_SCRIPT = re.compile(r"benchmarks/(\w+)\.py")


def _code_lines(page: Path) -> Iterator[str]:
    """Lines of indented and fenced code blocks; a line that ends with a backslash is joined."""
    text = page.read_text(encoding="utf-8").replace("\\\n", "")
    fenced = re.findall(r"^```(?:sh|text)?\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^ {4}(.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M), re.M)
    for line in [*"".join(fenced).splitlines(), *indented]:
        yield line.removeprefix("$ ").strip()


def _commands(first: str) -> list[Any]:
    """Each command whose first word is `first`: its words, without comment and `[--optional]`."""
    found: dict[str, Any] = {}
    for page in _PAGES:
        for line in _code_lines(page):
            if line.startswith(f"{first} ") and not line.startswith("iobench exec:"):
                plain = re.sub(r"\[[^\]]*\]", "", line)
                words = shlex.split(plain, comments=True)[1:]
                found[f"{page.name}: {line}"] = pytest.param(words, id=f"{page.stem}-{line[:60]}")
    return list(found.values())


def _parse(words: list[str]) -> None:
    """Parse an iobench command; nothing is run. Raises what typer raises for a wrong one."""
    command: Any = typer.main.get_command(app)
    context, rest = command.make_context("iobench", list(words)), list(words)
    while hasattr(command, "commands"):
        _, command, rest = command.resolve_command(context, rest)
        context = command.make_context(command.name, rest, parent=context)


@pytest.mark.parametrize("words", _commands("iobench"))
def test_iobench_parses_it(words: list[str]) -> None:
    """The verb exists, and its options and their values are accepted."""
    _parse(words)


@pytest.mark.parametrize("words", [["nope"], ["run", "--nope"], ["show", "--format", "jsn"]])
def test_a_wrong_command_is_found(words: list[str]) -> None:
    """The check itself can fail."""
    with pytest.raises(Exception, match=r"nope|jsn"):
        _parse(words)


@pytest.mark.parametrize("words", _commands("python"))
def test_the_script_has_the_options(words: list[str]) -> None:
    """The script is in the repository and names each option."""
    script, *rest = words
    source = (_ROOT / script).read_text() + (_ROOT / "benchmarks" / "record.py").read_text()
    assert [
        option for option in rest if option.startswith("-") and f'"{option}"' not in source
    ] == []


@pytest.mark.parametrize("words", _commands("make"))
def test_make_has_the_target(words: list[str]) -> None:
    """What is typed is a target of the Makefile."""
    assert f"\n{words[0]}:" in (_ROOT / "Makefile").read_text()


def test_benchmarks_that_pages_name_exist() -> None:
    """Also in running text."""
    named = {name for page in _PAGES for name in _SCRIPT.findall(page.read_text())}
    assert "tables" in named
    assert not [name for name in named if not (_ROOT / "benchmarks" / f"{name}.py").exists()]


def test_links_lead_somewhere() -> None:
    """Every relative link of every page, and CONTRIBUTING.md's."""
    links = [
        (page, link)
        for page in [*_PAGES, _ROOT / "CHANGELOG.md"]
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    ]
    assert len(links) > 50
    assert not [(page.name, link) for page, link in links if not (page.parent / link).exists()]
