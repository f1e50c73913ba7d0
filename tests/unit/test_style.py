"""The style of the house that a tool can check: names, lengths, and reasons."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import iobench

_PACKAGE = Path(iobench.__file__).parent
_ROOT = Path(__file__).parents[2]
_CAMEL = re.compile(r"[A-Z][a-z]\w*")
_SUPPRESSED = re.compile(r"# (noqa|type: ignore)\b(?P<rest>.*)")
_REASON = re.compile(r"(: [A-Z0-9, ]+ -- |\[[a-z, -]+\]  # )\S|: ARG002$")
"""ARG002 has one reason: the overridden method has this parameter."""


@functools.cache
def _package() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text("utf-8")) for path in _PACKAGE.rglob("*.py")}


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
    """A public class or type alias has a name of its own in the whole package."""
    places: dict[str, set[str]] = defaultdict(set)
    for path, tree in _package().items():
        for name in _defined(tree):
            places[name].add(path.relative_to(_PACKAGE).as_posix())
    shared = {name: files for name, files in places.items() if len(files) > 1}
    assert not shared


def test_lengths() -> None:
    """A file has at most 600 lines, and a function 60 after its parameters; commands have more."""
    long = [
        (path.name, node.name)
        for path, tree in _package().items()
        if path.parent.name != "cli"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.body[0].lineno >= 60
    ]
    sizes = {path.name: len(path.read_text("utf-8").splitlines()) for path in _package()}
    long += [(name, "") for name, lines in sizes.items() if lines > 600]
    assert not long


def test_a_suppressed_check_has_a_reason() -> None:
    """`# noqa: CODE -- reason` or `# type: ignore[code]  # reason`."""
    without = [
        f"{path.relative_to(_ROOT)}:{number}"
        for part in ("iobench", "tests", "benchmarks")
        for path in (_ROOT / part).rglob("*.py")
        if path != Path(__file__)
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if (found := _SUPPRESSED.search(line)) and not _REASON.match(found["rest"])
    ]
    assert not without
