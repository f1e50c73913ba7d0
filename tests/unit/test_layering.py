"""The floors of the package: imports only go down (docs/architecture.md lists the floors)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import iobench

_PACKAGE = Path(iobench.__file__).parent
_FLOORS = (
    *("cli", "report", "tune", "claims", "train", "goodput", "integrations", "bench", "peers"),
    *(
        "stats",
        "results",
        "offload",
        "checkpointer",
        "replicas",
        "remote",
        "exports",
        "verification",
        "checkpoint",
        "ranks",
        "workloads",
        "formats",
        "writers",
    ),
)
"""From the top down; a floor may import those after it, and itself."""
_LEAVES = ("environment", "linux", "regular_file", "text", "units", "errors", "_version")
"""Any floor may import them; each may import only those after it, and itself."""
_OPEN = ("testing", "__main__", "__init__")
"""May import anything; nothing but tests may import `testing`."""
_NAMED = {"torch": "cli", "safetensors": "cli"}
"""Public names of drop-ins, which nothing in the package imports: they count as the top floor."""
_ORDER = (*_FLOORS, *_LEAVES)


def _part(module: str) -> str:
    """`writers` of `iobench.writers.image`; `__init__` of `iobench` alone."""
    part = module.split(".")[1] if "." in module else "__init__"
    return _NAMED.get(part, part)


def _modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(_PACKAGE.rglob("*.py")):
        dotted = ".".join(("iobench", *path.relative_to(_PACKAGE).with_suffix("").parts))
        yield dotted.removesuffix(".__init__") if dotted != "iobench.__init__" else dotted, path


def _imports(tree: ast.AST) -> Iterator[str]:
    """Every module of iobench that the code imports, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            # `from iobench import linux` imports a module too.
            assert node.module is not None
            own = node.module == "iobench"
            names = [f"iobench.{alias.name}" for alias in node.names] if own else [node.module]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "iobench")


def _upward(part: str, imported: str) -> bool:
    if imported == part or part in _OPEN or imported == "__init__":
        return False
    return imported not in _ORDER or _ORDER.index(imported) < _ORDER.index(part)


@pytest.mark.parametrize(("module", "path"), [pytest.param(m, p, id=m) for m, p in _modules()])
def test_imports_only_go_down(module: str, path: Path) -> None:
    """A module imports its own floor, floors below it and leaves, by absolute names."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    relative = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level]
    assert not relative, f"{path}: relative imports hide which floor is meant"
    upward = sorted({name for name in _imports(tree) if _upward(_part(module), _part(name))})
    assert not upward, f"{module} imports {', '.join(upward)}: that is upwards"


def test_offload_is_a_leaf() -> None:
    """Only its verb imports it: `Checkpointer(offload=...)` asks the optimizer for the class."""
    importers = {
        module
        for module, path in _modules()
        if _part(module) != "offload"
        and "offload" in map(_part, _imports(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert importers == {"iobench.cli.offload"}


def test_every_part_has_its_floor() -> None:
    """No part of the package lacks a floor."""
    parts = {_part(module) for module, _ in _modules()}
    assert parts <= {*_ORDER, *_OPEN}


@pytest.mark.parametrize(
    ("importer", "imported", "upward"),
    [
        ("writers", "formats", True),
        ("bench", "cli", True),
        ("errors", "units", True),
        ("writers", "testing", True),
        ("units", "writers", True),
        ("cli", "writers", False),
        ("formats", "writers", False),
        ("writers", "linux", False),
        ("testing", "formats", False),
    ],
)
def test_the_rule_itself(importer: str, imported: str, upward: bool) -> None:
    """The rule of the other tests distinguishes up from down."""
    assert _upward(importer, imported) is upward


def test_imports_are_found_wherever_they_are() -> None:
    """Imports inside functions and of submodules by `from iobench import` count."""
    code = "import iobench.cli.main\ndef f():\n    from iobench import bench, linux\n"
    assert set(_imports(ast.parse(code))) == {"iobench.cli.main", "iobench.bench", "iobench.linux"}
