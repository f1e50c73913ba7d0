"""The pages of docs/api/: signatures and docstrings of public names, read from the source.

No module is imported, so that the pages need no framework. A class shows its public methods and
properties; a dataclass shows its fields in the signature.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
_WIDTH = 100
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def page_of(level: str, module: str) -> str:
    """Return the names of `__all__` of `module`, each with its signature and docstring.

    `level` is the mark of their headings: `###`.
    """
    tree = _tree(module)
    names = [one for one in _exported(tree) if not one.startswith("__")]
    return "\n".join(line for name in names for line in _entry(level, name, *_find(module, name)))


def _tree(module: str) -> ast.Module:
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _exported(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value), key=str.lower)
    return [one.name for one in tree.body if isinstance(one, _Function) and one.name[0] != "_"]


def _find(module: str, name: str) -> tuple[ast.stmt, ast.stmt | None]:
    """Return the definition of `name`, in `module` or where that imports it from, and the statement
    after it: a constant has its docstring there."""
    tree = _tree(module)
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef | _Function) and node.name == name:
            return node, None
        if isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if name in map(ast.unparse, targets):
                return node, after
    for inner in ast.walk(tree):
        if isinstance(inner, ast.ImportFrom) and inner.module:
            for one in inner.names:
                if name in (one.asname, one.name) and inner.module.startswith("iobench"):
                    return _find(inner.module, one.name)
    raise LookupError(f"{module} does not define or import {name}")


def _entry(level: str, name: str, node: ast.stmt, after: ast.stmt | None) -> Iterator[str]:
    yield f"{level} `{name}`\n"
    if isinstance(node, _Function):
        yield from _signature(name, node.args, node.returns)
        yield _text(node)
    elif isinstance(node, ast.ClassDef):
        yield from _class(level, name, node)
    else:
        yield f"```python\n{ast.unparse(node)}\n```\n"
        if isinstance(after, ast.Expr):
            yield _paragraphs(ast.literal_eval(after.value))


def _class(level: str, name: str, node: ast.ClassDef) -> Iterator[str]:
    methods = [one for one in node.body if isinstance(one, _Function)]
    maker = next((one for one in methods if one.name == "__init__"), None)
    if maker is not None:
        yield from _signature(name, maker.args, None)
    else:
        yield from _fields(name, node)
    yield _text(node)
    if maker is not None and ast.get_docstring(maker):
        yield _text(maker)
    for one in methods:
        if not one.name.startswith("_") and ast.get_docstring(one):
            yield f"{level}# `{name}.{one.name}`\n"
            if "property" not in " ".join(map(ast.unparse, one.decorator_list)):
                yield from _signature(one.name, one.args, one.returns)
            yield _text(one)


def _fields(name: str, node: ast.ClassDef) -> Iterator[str]:
    """Yield the fields of a dataclass, or the bases of another class."""
    if any("dataclass" in ast.unparse(one) for one in node.decorator_list):
        fields = [ast.unparse(one) for one in node.body if isinstance(one, ast.AnnAssign)]
        yield _code(name, fields, "")
    elif node.bases:
        yield f"```python\nclass {name}({', '.join(map(ast.unparse, node.bases))})\n```\n"


def _signature(name: str, arguments: ast.arguments, returns: ast.expr | None) -> Iterator[str]:
    """Yield the call, one argument to a line if it is long."""
    yield _code(name, _parts(arguments), f" -> {ast.unparse(returns)}" if returns else "")


def _parts(arguments: ast.arguments) -> list[str]:
    """Return each argument with its type and default, and the marks between them."""
    plain = [*arguments.posonlyargs, *arguments.args]
    first = len(plain) - len(arguments.defaults)
    parts = [
        _argument(one, arguments.defaults[at - first] if at >= first else None)
        for at, one in enumerate(plain)
        if one.arg not in ("self", "cls")
    ]
    if arguments.vararg:
        parts.append(f"*{ast.unparse(arguments.vararg)}")
    elif arguments.kwonlyargs:
        parts.append("*")
    parts += map(_argument, arguments.kwonlyargs, arguments.kw_defaults)
    if arguments.kwarg:
        parts.append(f"**{ast.unparse(arguments.kwarg)}")
    return parts


def _argument(one: ast.arg, default: ast.expr | None) -> str:
    if default is None:
        return ast.unparse(one)
    return f"{ast.unparse(one)}{' = ' if one.annotation else '='}{ast.unparse(default)}"


def _code(name: str, parts: list[str], returns: str) -> str:
    line = f"{name}({', '.join(parts)}){returns}"
    if len(line) > _WIDTH:
        line = f"{name}(\n" + "".join(f"    {one},\n" for one in parts) + f"){returns}"
    return f"```python\n{line}\n```\n"


def _text(node: ast.ClassDef | _Function) -> str:
    return _paragraphs(ast.get_docstring(node) or "")


def _paragraphs(text: str) -> str:
    """Return a docstring as Markdown."""
    return textwrap.dedent(text).strip() + "\n"
