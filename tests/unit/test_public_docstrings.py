"""Every public name has a docstring: the docs site shows them (docs/api/)."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_ROOT = Path(__file__).parents[2]
_PACKAGE = _ROOT / "iobench"
_PAGES = sorted((_ROOT / "docs" / "api").glob("iobench*.md"))
_MODULES = [
    name
    for page in _PAGES
    for name in re.findall(r"^#+ `(iobench.*)`$", page.read_text(), re.MULTILINE)
]
_OF_MODULES = ("formats", "integrations")  # packages whose names are modules
_FRAMEWORKS = "iobench.integrations."  # modules that load one: their text is read instead


def _without(name: str, value: Any) -> Iterator[str]:
    """The name of the class or function `value` and of its public members that have no docstring.

    A method may have that of the method which it overrides. The text that dataclass makes is none.
    """
    found = inspect.getdoc(value)
    if not found or found.startswith(f"{name.rpartition('.')[2]}("):
        yield name
    members = vars(value).items() if inspect.isclass(value) else ()
    for member, inner in members:
        documented = inspect.isroutine(inner) or isinstance(inner, property | cached_property)
        if not member.startswith("_") and documented and not inspect.getdoc(getattr(value, member)):
            yield f"{name}.{member}"


@cache
def _constants() -> set[str]:
    """Names of constants and type aliases of the package that are followed by a docstring."""
    documented = r'^(\w+)\b[^(\n]*=[^\n]*(?:\n[ )\]}][^\n]*)*\n"""'
    return {
        name
        for path in _PACKAGE.rglob("*.py")
        for name in re.findall(documented, path.read_text(), re.MULTILINE)
    }


@pytest.mark.parametrize("name", [one for one in _MODULES if not one.startswith(_FRAMEWORKS)])
def test_a_module_and_its_names(name: str) -> None:
    """Classes, functions, methods and properties by introspection, constants by their text."""
    module, constants = import_module(name), _constants()
    missing = [] if module.__doc__ else [name]
    for one in () if name.endswith(_OF_MODULES) else _public(module):
        value = getattr(module, one)
        if inspect.isclass(value) or inspect.isroutine(value):
            missing += _without(one, value)
        elif one not in constants:
            missing.append(one)
    assert not missing


def _public(module: ModuleType) -> list[str]:
    """`__all__`, or else what the module defines."""
    home = module.__name__
    own = [one for one, value in vars(module).items() if getattr(value, "__module__", "") == home]
    return getattr(module, "__all__", [one for one in own if not one.startswith("_")])


@pytest.mark.parametrize("name", [one for one in _MODULES if one.startswith(_FRAMEWORKS)])
def test_an_integration(name: str) -> None:
    """Each public class, function and method has a docstring of its own."""
    tree = ast.parse((_ROOT / f"{name.replace('.', '/')}.py").read_text())
    missing = [] if ast.get_docstring(tree) else [name]
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in [tree, *(one for one in tree.body if isinstance(one, ast.ClassDef))]:
        for one in node.body:
            if isinstance(one, kinds) and not one.name.startswith("_"):
                missing += [] if ast.get_docstring(one) else [one.name]
    assert not missing


def test_every_module_has_its_place() -> None:
    """The modules that users import, each on one page of docs/api/."""
    assert len(_MODULES) == len({*_MODULES})
    expected = {f"iobench.{one}" for one in import_module("iobench")._MODULES}
    for one in _OF_MODULES:
        expected |= {f"iobench.{one}.{name}" for name in import_module(f"iobench.{one}").__all__}
    assert {*_MODULES} == expected | {"iobench"}


@pytest.mark.parametrize("text", ["class C:\n    def m(self): ...", "def f(): ..."])
def test_a_missing_docstring_is_found(text: str) -> None:
    """The check itself can fail."""
    names: dict[str, Any] = {}
    exec(text, names)
    name, value = names.popitem()
    assert [*_without(name, value)]
