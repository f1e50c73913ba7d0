"""YAML schema of workloads and models, with one-line error messages for invalid files."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import yaml
from msgspec import Meta, ValidationError, convert

from iobench.errors import WorkloadFileError
from iobench.text import printable
from iobench.units import parse_size
from iobench.workloads.specs import FileFormat, Size, Text

SCHEMA = "iobench.workload/1"

Entry = TypeVar("Entry")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """A file of `iobench/workloads/models`, or with a `name` the model in a workload file."""

    name: str = ""
    family: Text
    source: str = ""
    arch: Any
    tokenizer: dict[Text, Annotated[int, Meta(ge=1)]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileEntry:
    """A file of `files`. `tensors` has a line for each: `bfloat16 32000x4096 head.weight`."""

    path: Text
    format: FileFormat = "raw"
    size_bytes: Annotated[int, Meta(ge=0, le=2**50)] | None = None
    tensors: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkloadEntry:
    """A workload file: either a model and a layout, or a list of files."""

    schema: Literal["iobench.workload/1"]
    description: str = ""
    model: Any = None
    layout: Any = None
    files: Annotated[list[Any], Meta(min_length=1)] | None = None
    step_time: Any = None
    source: str = ""


def read_yaml(path: Path) -> object:
    """Return the content of the YAML file at `path`. Raises WorkloadFileError (one line)."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise WorkloadFileError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise WorkloadFileError(f"{path}: is not UTF-8 text") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise WorkloadFileError(f"{path}{where}: is not YAML: {error.problem}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        line = " ".join(str(error).split())
        raise WorkloadFileError(f"{path}: is not YAML: {line}") from error
    except (LookupError, AttributeError, TypeError) as error:  # PyYAML raises these for `!!bool x`
        raise WorkloadFileError(f"{path}: is not YAML: a value does not fit its tag") from error


def write_yaml(content: object) -> str:
    """Return `content` as YAML, with texts of several lines as blocks."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=100)


class _Dumper(yaml.SafeDumper):
    def represent_str(self, data: str) -> Any:
        style = "|" if "\n" in data else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


def validate(kind: type[Entry], content: object, path: Path, prefix: tuple[str, ...] = ()) -> Entry:
    """Return `content` as `kind`, a dataclass.

    Raises WorkloadFileError with the first invalid field, its value and what is allowed. `prefix`
    is the path of `content` in the file.
    """
    described: Any = kind
    where, hints = ".".join(prefix), _hints(described)
    fields = {one.name: one for one in dataclasses.fields(described)}
    if not isinstance(content, dict):
        wanted = f"must be a mapping with the fields {', '.join(fields)}"
        if not where:
            raise WorkloadFileError(f"{path}: holds {_shown(content)}: {wanted}")
        raise problem(path, where, content, wanted)
    values: dict[str, Any] = {}
    for name, value in content.items():
        field = ".".join((*prefix, str(name)))
        if name not in fields:
            known = f"there is no such field; known here: {', '.join(fields)}"
            raise problem(path, field, value, known)
        try:
            if hints[name] is Size and isinstance(value, str):
                value = parse_size(value)
            values[name] = convert(value, hints[name])
        except ValidationError as error:
            raise problem(path, field, value, _allowed(hints[name], error)) from error
        except ValueError as error:
            raise problem(path, field, value, str(error)) from error
    for name, one in fields.items():
        needed = one.default is one.default_factory is dataclasses.MISSING
        if needed and name not in values:
            raise WorkloadFileError(f"{path}: field {'.'.join((*prefix, name))!r} is missing")
    return kind(**values)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _allowed(kind: Any, error: ValidationError) -> str:
    """Return what is allowed, in msgspec's words: `Expected ...` becomes `must be ...`."""
    if isinstance((names := get_args(kind) or ("",))[0], str):  # a Literal
        return f"must be one of {', '.join(names)}"
    return str(error).partition(", got")[0].replace("Expected", "must be").replace("`", "")


def problem(path: Path, field: str, value: object, allowed: str) -> WorkloadFileError:
    return WorkloadFileError(f"{path}: field {field!r} is {_shown(value)}: {allowed}")


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, aliases, and control characters."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):  # a few lines of nested ones name billions of values
            event = self.get_event()  # type: ignore[no-untyped-call]  # PyYAML has no types
            raise _problem("an alias: write the value itself", event)
        return super().compose_node(parent, index)

    def construct_scalar(self, node: Any) -> Any:
        value = super().construct_scalar(node)
        plain = value.replace("\n", "").replace("\t", "")
        if printable(plain) != plain:  # YAML forbids raw control characters but allows escapes
            raise _problem("a text with control characters", node)
        return value

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is not None and key in seen:
                raise _problem(f"the key {key!r} is given twice", key_node)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _problem(text: str, node: Any) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, text, node.start_mark)


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
