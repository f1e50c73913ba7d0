"""No file imports another one that imports it, directly or through others."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import pytest

import iobench

_PACKAGE = Path(iobench.__file__).parent


def _imports(of: str) -> dict[str, set[str]]:
    """Each module below `iobench.<of>`, and those of them that it imports anywhere."""
    files = {
        ".".join(("iobench", *path.relative_to(_PACKAGE).with_suffix("").parts)): path
        for path in (_PACKAGE / of).rglob("*.py")
        if path.name != "__init__.py"  # it exports what the others define
    }
    found: dict[str, set[str]] = {}
    for module, path in files.items():
        names = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        found[module] = names & files.keys()
    return found


@pytest.mark.parametrize(
    "package",
    [
        *("bench", "cli", "environment", "formats", "integrations", "peers", "report", "results"),
        *("testing", "train", "tune", "workloads", "writers", "checkpoint", "goodput", "claims"),
        *("ranks", "remote", "replicas", "checkpointer", "offload", "verification", "exports"),
        "stats",
    ],
)
def test_files_import_each_other_in_one_direction(package: str) -> None:
    """Imports inside functions and for types alone count: they couple the files all the same."""
    modules = _imports(package)
    assert modules
    assert any(modules.values())
    try:
        graphlib.TopologicalSorter(modules).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
