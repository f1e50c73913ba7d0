"""The structure of the package: imports only go down (docs/architecture.md lists the floors), no
file imports another one that imports it, and what a tool can check of the style of the house:
names, lengths, and reasons."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import iobench

_PACKAGE = Path(iobench.__file__).parent
_ROOT = Path(__file__).parents[2]
_PAGE = (_ROOT / "docs" / "architecture.md").read_text()
_FLOORS = (
    *("cli", "report", "tune", "claims", "train", "goodput", "integrations", "bench", "peers"),
    *("stats", "results", "offload", "checkpointer", "replicas", "remote", "exports"),
    *("verification", "checkpoint", "ranks", "workloads", "formats", "writers"),
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


@functools.cache
def _package() -> dict[Path, ast.Module]:
    paths = sorted(_PACKAGE.rglob("*.py"))
    return {path: ast.parse(path.read_text("utf-8")) for path in paths}


def _modules() -> Iterator[tuple[str, ast.Module]]:
    for path, tree in _package().items():
        dotted = ".".join(("iobench", *path.relative_to(_PACKAGE).with_suffix("").parts))
        yield dotted.removesuffix(".__init__") if dotted != "iobench.__init__" else dotted, tree


@functools.cache
def _import_nodes(tree: ast.AST) -> list[ast.Import | ast.ImportFrom]:
    """Every import of the code, wherever in the file."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def _imports(tree: ast.AST) -> Iterator[str]:
    """Every module of iobench that the code imports."""
    for node in _import_nodes(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif not node.level:
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


def test_imports_only_go_down() -> None:
    """A module imports its own floor, floors below it and leaves, by absolute names: relative ones
    hide which floor is meant."""
    wrong = []
    for module, tree in _modules():
        part = _part(module)
        wrong += [(module, name) for name in _imports(tree) if _upward(part, _part(name))]
        relative = [n for n in _import_nodes(tree) if isinstance(n, ast.ImportFrom) and n.level]
        wrong += [(module, ast.unparse(node)) for node in relative]
    assert not wrong


def test_offload_is_a_leaf() -> None:
    """Only its verb imports it: `Checkpointer(offload=...)` asks the optimizer for the class."""
    importers = {
        module
        for module, tree in _modules()
        if _part(module) != "offload" and "offload" in map(_part, _imports(tree))
    }
    assert importers == {"iobench.cli.offload"}


def test_every_part_has_its_floor() -> None:
    """No part of the package lacks a floor."""
    parts = {_part(module) for module, _ in _modules()}
    assert parts <= {*_ORDER, *_OPEN}


def test_the_rule_itself() -> None:
    """It distinguishes up from down, and finds imports inside functions and of submodules by
    `from iobench import`."""
    up = [("writers", "formats"), ("bench", "cli"), ("errors", "units"), ("units", "writers")]
    down = [
        ("cli", "writers"),
        ("formats", "writers"),
        ("writers", "linux"),
        ("testing", "formats"),
    ]
    assert all(_upward(*pair) for pair in [*up, ("writers", "testing")])
    assert not any(_upward(*pair) for pair in down)
    code = "import iobench.cli.main\ndef f():\n    from iobench import bench, linux\n"
    assert set(_imports(ast.parse(code))) == {"iobench.cli.main", "iobench.bench", "iobench.linux"}


def test_files_import_each_other_in_one_direction() -> None:
    """Imports inside functions and for types alone count: they couple the files all the same."""
    # An __init__ exports what the others define.
    modules = {
        ".".join(("iobench", *path.relative_to(_PACKAGE).with_suffix("").parts)): tree
        for path, tree in _package().items()
        if path.name != "__init__.py"
    }
    imports = {}
    for module, tree in modules.items():
        names = {*_imports(tree)}
        for node in _import_nodes(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
        imports[module] = {one for one in names & modules.keys() if _part(one) == _part(module)}
    assert sum(map(len, imports.values())) > 500
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


_CAMEL = re.compile(r"[A-Z][a-z]\w*")
_SUPPRESSED = re.compile(r"# (noqa|type: ignore)\b(?P<rest>.*)")
_REASON = re.compile(r"(: [A-Z0-9, ]+ -- |\[[a-z, -]+\]  # )\S|: ARG002$")
"""ARG002 has one reason: the overridden method has this parameter."""


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


def test_one_checkpointer() -> None:
    """A Checkpointer is composed: ranks, tiers and offload are parts, and no class of their own."""
    bases = {
        (path.name, ast.unparse(base))
        for path, tree in _package().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for base in node.bases
    }
    assert len(bases) > 100
    assert not [one for one in bases if one[1].endswith("Checkpointer")]


def _rooms(parent: str) -> set[str]:
    """Packages inside a floor."""
    return {path.parent.name for path in (_ROOT / "iobench" / parent).glob("*/__init__.py")}


def test_floors_are_those_of_the_page() -> None:
    """In the same order."""
    table = _PAGE.split("| floor |", 1)[1].split("\n\n", 1)[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [*_FLOORS]


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
        assert not {*_imports(ast.parse(text))} & above, path
