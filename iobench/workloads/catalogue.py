"""Lookup of workloads by name or path, and construction from their YAML."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iobench.errors import UnknownNameError, WorkloadFileError
from iobench.text import printable
from iobench.workloads.models.families import FAMILIES
from iobench.workloads.models.model import Arch, Family, Model
from iobench.workloads.workload import ModelWorkload, StepTime, Workload

if TYPE_CHECKING:
    from iobench.workloads.layouts import Layout
    from iobench.workloads.schema import ModelEntry

_DIRECTORY = Path(__file__).parent


def names() -> list[str]:
    """Return the names of the workloads that ship with iobench, sorted."""
    return sorted(path.stem for path in _DIRECTORY.glob("*.yaml"))


def model_names() -> list[str]:
    """Return the names of the models that ship with iobench, sorted."""
    return sorted(path.stem for path in _DIRECTORY.glob("models/*.yaml"))


def load(name_or_path: str | os.PathLike[str]) -> Workload:
    """Return a workload by name, or from the YAML file at a path (text with "/", .yaml or .yml).

    Raises UnknownNameError for an unknown name, and WorkloadFileError for a missing or invalid
    file. Its message is one line with the file, the field, its value and what is allowed.
    """
    text = os.fspath(name_or_path)
    if os.sep in text or text.endswith((".yaml", ".yml")):
        return _build(Path(text))
    if text not in names():
        raise UnknownNameError("workload", text, names())
    return _build(_DIRECTORY / f"{text}.yaml")


@cache
def load_model(name: str) -> Model:
    """Return the architecture of that name. Raises UnknownNameError."""
    from iobench.workloads.schema import ModelEntry, read_yaml, validate

    if name not in model_names():
        raise UnknownNameError("model", name, model_names())
    path = _DIRECTORY / f"models/{name}.yaml"
    return _model(name, validate(ModelEntry, read_yaml(path), path), path, ())


def built(content: object, path: Path, name: str) -> Workload:
    """Return the workload of a file's `content`; `path` is for messages.

    Raises WorkloadFileError like `load`.
    """
    from iobench.workloads.schema import ModelEntry, WorkloadEntry, problem, validate

    entry = validate(WorkloadEntry, content, path)
    facts: dict[str, Any] = {
        "name": printable(name),
        "description": entry.description,
        "source": entry.source,
    }
    if entry.step_time is not None:
        facts["step_time"] = validate(StepTime, entry.step_time, path, ("step_time",))
    if entry.files is not None:
        from iobench.workloads.listed import ListedWorkload, specs_of

        for field in ("model", "layout"):
            if getattr(entry, field) is not None:
                raise WorkloadFileError(f"{path}: field {field!r}: leave it out, or 'files'")
        return ListedWorkload.of(specs_of(entry.files, path), **facts)
    for field in ("model", "layout"):
        if getattr(entry, field) is None:
            raise WorkloadFileError(f"{path}: field {field!r} is missing")
    if isinstance(entry.model, dict):
        inline = validate(ModelEntry, entry.model, path, ("model",))
        model = _model(inline.name or name, inline, path, ("model",))
    elif entry.model in model_names():
        model = load_model(entry.model)
    else:
        known = f"must be one of {', '.join(model_names())}, or a mapping with family and arch"
        raise problem(path, "model", entry.model, known)
    layout = _layout(entry.layout, path)
    try:
        layout.check(layout.prepare(model))
    except ValueError as error:
        raise WorkloadFileError(f"{path}: field 'layout': {error}") from error
    return ModelWorkload(model=model, layout=layout, **facts)


def _build(path: Path) -> Workload:
    from iobench.workloads.schema import read_yaml

    return built(read_yaml(path), path, path.stem)


def _model(name: str, entry: ModelEntry, path: Path, prefix: tuple[str, ...]) -> Model:
    from iobench.workloads.schema import problem, validate

    def field(*parts: str) -> str:
        return ".".join((*prefix, *parts))

    if entry.family not in FAMILIES:
        known = f"must be one of {', '.join(FAMILIES)}"
        raise problem(path, field("family"), entry.family, known)
    family = FAMILIES[entry.family]
    arch = validate(Arch, entry.arch, path, (*prefix, "arch"))
    _check_arch(arch, family, path, field)
    return Model(
        name=name,
        family=family,
        arch=arch,
        source=entry.source,
        tokenizer=entry.tokenizer,
    )


def _check_arch(arch: Arch, family: Family, path: Path, field: Callable[[str, str], str]) -> None:
    """Raise WorkloadFileError for numbers that do not fit each other or the family."""
    from iobench.workloads.schema import problem

    for name, symbols, needed in (
        ("max_positions", {"P"}, True),
        ("num_kv_heads", {"NKV", "QKV"}, False),
        ("head_dim", {"HD", "QKV"}, False),
        ("num_experts", {"E"}, True),
        ("expert_ffn_size", {"FE", "FS"}, True),
        ("num_shared_experts", {"FS"}, True),
        ("num_dense_layers", {"dense layers"}, False),
        ("q_lora_rank", {"QR"}, True),
        ("kv_lora_rank", {"KR", "KVA"}, True),
        ("qk_nope_head_dim", {"QD", "KVB"}, True),
        ("qk_rope_head_dim", {"QD", "KVA"}, True),
        ("v_head_dim", {"VD", "KVB"}, True),
    ):
        known = family.symbols | ({"dense layers"} if family.dense_layer else set())
        value, used = getattr(arch, name), bool(symbols & known)
        if value is not None and not used:
            unused = f"family {family.id!r} does not use it; remove it"
            raise problem(path, field("arch", name), value, unused)
        if value is None and used and needed:
            raise WorkloadFileError(
                f"{path}: field {field('arch', name)!r} is missing: family {family.id!r} needs it"
            )
    if arch.num_dense_layers and arch.num_dense_layers > arch.num_layers:
        limit = f"must be at most num_layers, {arch.num_layers}"
        raise problem(path, field("arch", "num_dense_layers"), arch.num_dense_layers, limit)
    heads, kv_heads, hidden = arch.num_heads, arch.num_kv_heads, arch.hidden_size
    if heads > hidden or (family.whole_heads and not arch.head_dim and hidden % heads):
        raise problem(path, field("arch", "num_heads"), heads, f"must divide hidden_size {hidden}")
    if kv_heads and heads % kv_heads:
        wanted = f"must divide num_heads {heads}"
        raise problem(path, field("arch", "num_kv_heads"), kv_heads, wanted)


def _layout(content: object, path: Path) -> Layout:
    from iobench.workloads.layouts import LAYOUTS, MAX_RANKS
    from iobench.workloads.schema import problem, validate

    if not isinstance(content, dict):
        raise problem(path, "layout", content, "must be a mapping with an id")
    fields = dict(content)
    kind = fields.pop("id", None)
    if not isinstance(kind, str) or kind not in LAYOUTS:
        raise problem(path, "layout.id", kind, f"must be one of {', '.join(LAYOUTS)}")
    layout = validate(LAYOUTS[kind], fields, path, ("layout",))
    if layout.ranks > MAX_RANKS:
        raise problem(path, "layout", layout.ranks, f"at most {MAX_RANKS} ranks are allowed")
    return layout
