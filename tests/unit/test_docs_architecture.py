"""docs/architecture.md: its floors are those of test_layering; its packages and files exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PAGE = (_ROOT / "docs" / "architecture.md").read_text()


def _rooms(parent: str) -> set[str]:
    """Packages inside a floor."""
    return {path.parent.name for path in (_ROOT / "iobench" / parent).glob("*/__init__.py")}


def test_floors_are_those_that_are_checked() -> None:
    """In the same order."""
    tree = ast.parse((_ROOT / "tests" / "unit" / "test_layering.py").read_text())
    floors = next(
        ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_FLOORS"
    )
    table = _PAGE.split("| floor |", 1)[1].split("\n\n", 1)[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == re.findall(r"'(\w+)'", floors)


def test_every_room_is_named() -> None:
    """The packages of writers/ in the table, those of bench/ below it."""
    writers, bench = _PAGE.split("Inside `writers/`", 1)[1].split("Inside `bench/`", 1)
    assert set(re.findall(r"^\| `(\w+)/`", writers, re.MULTILINE)) == _rooms("writers")
    assert set(re.findall(r"`(\w+)/` \(", bench)) == _rooms("bench")


def test_every_file_exists() -> None:
    """Paths are relative to the repository, or to the package; NAME stands for a new file."""
    named = set(re.findall(r"`((?:\w+/)+(?:\w+\.\w+)?)`", _PAGE))
    assert len(named) > 30
    homes = [_ROOT, *(_ROOT / "iobench" / part for part in ("", "writers", "bench"))]
    known = {path for path in named if any((home / path).exists() for home in homes)}
    assert not {path for path in named - known if "NAME" not in path}


def test_every_class_exists() -> None:
    """Names in code spans that look like classes are classes of the package."""
    named = set(re.findall(r"`([A-Z][A-Za-z]+[a-z])`", _PAGE))
    assert len(named) > 10
    text = "\n".join(path.read_text() for path in (_ROOT / "iobench").rglob("*.py"))
    assert not {name for name in named if not re.search(rf"^class {name}\b", text, re.MULTILINE)}


def test_a_save_is_drawn_in_the_order_of_imports() -> None:
    """Of the files from `save_async` to the rename none imports one above it."""
    drawn = _PAGE.split("How `save_async` reaches the rename", 1)[1].split("\n\n", 2)[1]
    rows = re.findall(r"^\| `(\S+\.py)` \| `(\w+)(?:\.(\w+))?` \|", drawn, re.MULTILINE)
    assert len(rows) > 8
    above: set[str] = set()
    for path, name, method in rows:
        text = (_ROOT / "iobench" / path).read_text()
        assert re.search(rf"^(class|def) {name}\b", text, re.MULTILINE), (path, name)
        assert not method or f"    def {method}(" in text, (path, method)
        above.add("iobench." + path.removesuffix(".py").replace("/", "."))
        imported = {
            node.module
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.ImportFrom) and node.module
        }
        assert not imported & above, path
