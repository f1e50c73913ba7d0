"""YAML schema of workloads and models, with one-line error messages for invalid files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from iobench.errors import WorkloadFileError
from iobench.text import printable
from iobench.workloads.specs import FileFormat

SCHEMA = "iobench.workload/1"

Text = Annotated[str, Field(min_length=1)]
Length = Annotated[int, Field(ge=1, le=2**27)]
"""A dimension of a tensor. The bound turns a typing error into a message, not an hour of work."""
Entry = TypeVar("Entry")

_MOST_VALUES = 100_000  # of 10,000 listed files; without a list, the largest that ships has 60


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ArchEntry(_Entry):
    """`arch`: see `iobench.workloads.models.model.Arch`."""

    vocab_size: Length
    hidden_size: Length
    num_layers: Annotated[int, Field(ge=1, le=10_000)]
    num_heads: Length
    ffn_hidden_size: Length
    num_kv_heads: Length | None = None
    head_dim: Length | None = None
    max_positions: Length | None = None
    num_experts: Annotated[int, Field(ge=1, le=10_000)] | None = None
    expert_ffn_size: Length | None = None
    num_shared_experts: Annotated[int, Field(ge=1, le=10_000)] | None = None
    num_dense_layers: Annotated[int, Field(ge=1, le=10_000)] | None = None
    q_lora_rank: Length | None = None
    kv_lora_rank: Length | None = None
    qk_nope_head_dim: Length | None = None
    qk_rope_head_dim: Length | None = None
    v_head_dim: Length | None = None


class ModelEntry(_Entry):
    """A file of `iobench/workloads/models`."""

    family: Text
    source: str = ""
    arch: ArchEntry
    tokenizer: dict[Text, PositiveInt] = {}


class InlineModelEntry(ModelEntry):
    """A model that is described inside a workload file."""

    name: Text


class LayoutEntry(BaseModel):
    """`layout`: an id, and the parameters of that layout."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    id: Text


class FileEntry(_Entry):
    """A file of `files`. `tensors` has a line for each: `bfloat16 32000x4096 head.weight`."""

    path: Text
    format: FileFormat = "raw"
    size_bytes: Annotated[int, Field(ge=0, le=2**50)] | None = None
    tensors: str = ""


class StepTimeEntry(_Entry):
    """`step_time`: seconds per training step, the number and type of GPUs, and the source."""

    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    gpus: PositiveInt
    hardware: Text
    precision: Text
    source: Text


class WorkloadEntry(_Entry):
    """A workload file: either a model and a layout, or a list of files."""

    schema_: Annotated[Literal["iobench.workload/1"], Field(alias="schema")]
    description: str = ""
    model: str | InlineModelEntry | None = None
    layout: LayoutEntry | None = None
    files: Annotated[list[FileEntry], Field(min_length=1)] | None = None
    step_time: StepTimeEntry | None = None
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
    """Return `content` as `kind`, a pydantic model or dataclass.

    Raises WorkloadFileError with the first invalid field, its value and what is allowed. `prefix`
    is the path of `content` in the file.
    """
    if not isinstance(content, dict):
        where = ".".join(prefix)
        wanted = f"a mapping with the fields {', '.join(_field_names(kind))}"
        if not where:
            raise WorkloadFileError(f"{path}: holds {_shown(content)}: must be {wanted}")
        raise problem(path, where, content, f"must be {wanted}")
    try:
        if issubclass(kind, BaseModel):
            return kind.model_validate(content)
        return kind(**content)
    except ValidationError as error:
        raise _first_problem(kind, error, path, prefix) from error
    except TypeError as error:  # keys of the mapping that are not strings
        raise WorkloadFileError(f"{path}: field {'.'.join(prefix)!r}: {error}") from error


def problem(path: Path, field: str, value: object, allowed: str) -> WorkloadFileError:
    return WorkloadFileError(f"{path}: field {field!r} is {_shown(value)}: {allowed}")


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, aliases that multiply, and control characters."""

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None:
            _count(node, {})
        return node

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


def _count(node: Any, known: dict[int, int]) -> int:
    """Return the number of values of `node`, counting an alias as everything that it names.

    The loader shares aliased content, but a later traversal visits each copy. A few lines of nested
    aliases would keep it busy forever. Raises ConstructorError.
    """
    if id(node) in known:
        if not known[id(node)]:
            raise _problem("an alias that contains itself", node)
        return known[id(node)]
    known[id(node)] = 0
    count = 1
    if isinstance(node, yaml.SequenceNode):
        count += sum(_count(child, known) for child in node.value)
    elif isinstance(node, yaml.MappingNode):
        count += sum(_count(child, known) for pair in node.value for child in pair)
    if count > _MOST_VALUES:
        raise _problem(f"more than {_MOST_VALUES:,} values, aliases counted in full", node)
    known[id(node)] = count
    return count


def _problem(text: str, node: Any) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, text, node.start_mark)


def _first_problem(
    kind: type[Any], error: ValidationError, path: Path, prefix: tuple[str, ...]
) -> WorkloadFileError:
    details = error.errors(include_url=False)
    # pydantic reports an error for every member of a union. The deepest one fits the user's intent.
    detail = max(details, key=lambda entry: (entry["type"] == "extra_forbidden", len(entry["loc"])))
    parts = [str(part) for part in detail["loc"] if part not in ("InlineModelEntry", "str")]
    field = ".".join((*prefix, *parts))
    owner = _owner(kind, parts[:-1])
    if detail["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        known = ", ".join(_field_names(owner))
        return problem(path, field, detail["input"], f"there is no such field; known here: {known}")
    if detail["type"] in ("missing", "missing_argument"):
        return WorkloadFileError(f"{path}: field {field!r} is missing")
    if field == "model":
        return problem(path, field, detail["input"], "must be a model's name, or a mapping")
    return problem(path, field, detail["input"], _allowed(detail["msg"]))


def _allowed(message: str) -> str:
    """Reword pydantic's message: `Input should be ...` becomes `must be ...`."""
    if "valid dictionary" in message:
        return "must be a mapping"
    for old, new in (("Input should be ", "must be "), ("Value error, ", "")):
        message = message.replace(old, new)
    return message[:1].lower() + message[1:]


def _owner(kind: type[Any], parts: list[str]) -> type[Any]:
    """Return the class that has the fields under `parts`."""
    nested: dict[str, type[Any]] = {
        "arch": ArchEntry,
        "model": InlineModelEntry,
        "layout": LayoutEntry,
        "step_time": StepTimeEntry,
    }
    if parts and parts[0] == "files":
        return FileEntry
    return nested.get(parts[-1], kind) if parts else kind


def _field_names(kind: type[Any]) -> list[str]:
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return [field.alias or name for name, field in kind.model_fields.items()]


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
