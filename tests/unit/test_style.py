"""One name, one thing: a public class or type alias has a name of its own in the whole package."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import iobench

_PACKAGE = Path(iobench.__file__).parent
_CAMEL = re.compile(r"[A-Z][a-z]\w*")


def _defined(tree: ast.Module) -> Iterator[str]:
    """Public classes, and aliases of types such as `State = Mapping[str, Tensor]`."""
    for node in tree.body:
        names = []
        if isinstance(node, ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [one.id for one in node.targets if isinstance(one, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        yield from (name for name in names if _CAMEL.fullmatch(name))


def test_a_public_name_stands_for_one_thing() -> None:
    places: dict[str, set[str]] = defaultdict(set)
    for path in _PACKAGE.rglob("*.py"):
        for name in _defined(ast.parse(path.read_text(encoding="utf-8"))):
            places[name].add(path.relative_to(_PACKAGE).as_posix())
    shared = {name: files for name, files in places.items() if len(files) > 1}
    assert not shared
