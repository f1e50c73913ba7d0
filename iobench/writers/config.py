"""A writer as a TOML file with its origin: a tuner writes it, and a trainer loads it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tomllib
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from iobench.environment import machine_fingerprint
from iobench.errors import (
    IobenchError,
    OptionError,
    TargetError,
    UnknownNameError,
    UsageError,
)
from iobench.text import printable
from iobench.writers import registry
from iobench.writers.base import Writer

WriterLike = Writer | str | os.PathLike[str]
"""A Writer, the name of one (`odirect,block_size=8MiB` with options), or the path of a config."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The measurements of `iobench autotune` for its choice. Programs read only `fingerprint`.

    `fingerprint` identifies the machine (`iobench.environment.machine_fingerprint`). `target` is
    the directory or prefix that was tuned.
    `median` and `interval` are texts with units: the objective in `samples` confirmations of
    `size_bytes`. `ratio` says how many times better than `baseline` the setting is, with a 95%
    interval; `over_runner_up` compares it with the second best. They are None without such a
    setting. `paths` are those that the bytes took. `verdict` judges the samples (docs/results.md).
    """

    date: str
    iobench: str
    workload: str
    objective: str
    target: str
    storage: str
    machine: str
    fingerprint: str
    size_bytes: int
    samples: int
    median: str
    interval: str
    paths: tuple[str, ...] = ()
    finding: str
    verdict: str | None = None
    baseline: str | None = None
    ratio: float | None = None
    ratio_interval: tuple[float, ...] | None = None
    runner_up: str | None = None
    over_runner_up: float | None = None

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Tuned:
        """Make it from the table of a file. Raises UnknownNameError, OptionError."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in names:
                raise UnknownNameError("key of [tuned]", name, names)
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise OptionError(f"[tuned]: {error}; iobench autotune writes it") from error

    def items(self) -> list[tuple[str, Any]]:
        """Return the names and values that are not None, in order."""
        named = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        return [(name, value) for name, value in named if value is not None]


SCHEMA = "iobench.writer/1"
_FAMILY, _VERSION = SCHEMA.split("/")
_KEYS = ("schema", "writer", "format", "options", "tuned")

_OPTION = re.compile(r",\s*\w+\s*=")

_warned: set[str] = set()
"""The files that have already caused the warning about another machine."""


@dataclass(frozen=True, kw_only=True)
class WriterConfig:
    """The content of a TOML file: a writer, its options and their origin.

    `format` is the format of the files that were tuned (`torch`, `safetensors`, `raw`), or None if
    the file has no such key.
    """

    path: Path
    name: str
    options: dict[str, Any]
    format: str | None = None
    tuned: Tuned | None = None

    def make(self, **overrides: Any) -> Writer:
        """Make the writer; `overrides` replace options of the file. Raises like `load_writer`."""
        try:
            return registry.make(self.name, **{**self.options, **overrides})
        except IobenchError as error:
            _add_path(error, self.path)
            raise


def dump_writer(
    writer: Writer,
    tuned: Tuned | None = None,
    *,
    file_format: str | None = None,
    comment: Iterable[str] = (),
) -> str:
    """Return the TOML text from which `load_writer` makes an equal writer.

    `comment` are comment lines at the top, `tuned` is the origin of the settings.
    """
    lines = [f"# {printable(line)}" for line in comment]
    lines += [f'schema = "{SCHEMA}"', f'writer = "{writer.name}"']
    if file_format is not None:
        lines.append(f"format = {_toml(file_format)}")
    lines += ["", "[options]"]
    for info in writer.options.describe():
        value = getattr(writer.options, info.name)
        shown = info.show(value) if info.unit == "bytes" else value
        lines.append(f"{info.name} = {_toml(shown)}")
    if tuned is not None:
        lines += ["", "[tuned]", *(f"{name} = {_toml(value)}" for name, value in tuned.items())]
    return "\n".join(lines) + "\n"


def load_writer(
    path_or_name: str | os.PathLike[str],
    *,
    target: str | Path | None = None,
    **overrides: Any,
) -> Writer:
    """Make a writer from its name or TOML file; `overrides` replace options of both.

    A text that ends in `.toml` or contains a `/`, and any Path, is the path of a file. Options may
    follow a text after commas: `odirect,block_size=8MiB`, `writer.toml,threads=2`. All functions
    that take the text of one writer read it like this.

    The writer is tried in `target`, or else in the target that the file was tuned for, if that
    exists. Without either, the first transfer shows whether it works. A file from another machine
    causes one RuntimeWarning.

    Raises UsageError for a file that is not a writer's or has a newer schema, UnknownNameError and
    OptionError for its content. Raises UnavailableError with a remedy for a
    writer that does not work here.
    """
    config, name, options = _read_text(path_or_name)
    options = {**options, **overrides}
    made = config.make(**options) if config else registry.make(name, **options)
    if target is not None:
        made.require(target)
    if config and config.tuned:
        place = config.tuned.target
        if target is None and ("://" in place or os.path.isdir(place)):
            with suppress(TargetError):  # it is gone
                made.require(place)
        _check_machine(config.path, config.tuned)
    return made


def writer_of(writer: WriterLike) -> Writer:
    """Return `writer`, or the one that `load_writer` makes of it."""
    return writer if isinstance(writer, Writer) else load_writer(writer)


def _read_text(
    path_or_name: str | os.PathLike[str],
) -> tuple[WriterConfig | None, str, dict[str, Any]]:
    """Return the content of the file if the text names one, the name, and the options after it."""
    text = os.fspath(path_or_name)
    whole = not isinstance(path_or_name, str) or (_is_path(text) and not _OPTION.search(text))
    found = [(text, {})] if whole else registry.split_specs(text)  # paths may contain commas
    if len(found) != 1:
        raise UsageError(f"writer {text!r} names {len(found)} writers; give exactly one")
    ((name, options),) = found
    config = read_config(name) if whole or _is_path(name) else None
    return config, name, dict(options)


def _is_path(text: str) -> bool:
    return text.endswith(".toml") or "/" in text


def read_config(path: str | os.PathLike[str]) -> WriterConfig:
    """Read the TOML file at `path` without making a writer. Raises UsageError or a subclass."""
    file = Path(path)
    document = _read(file)
    options = document.get("options", {})
    if not isinstance(document.get("writer"), str) or not isinstance(options, dict):
        raise UsageError(f"{file}: must have writer = NAME and may have a table [options]")
    file_format, tuned = document.get("format"), document.get("tuned")
    if not (file_format is None or isinstance(file_format, str)) or not (
        tuned is None or isinstance(tuned, dict)
    ):
        raise UsageError(f"{file}: format must be a text, [tuned] a table")
    try:
        return WriterConfig(
            path=file,
            name=document["writer"],
            options=options,
            format=file_format,
            tuned=None if tuned is None else Tuned.from_mapping(tuned),
        )
    except UsageError as error:
        _add_path(error, file)
        raise


def _add_path(error: IobenchError, path: Path) -> None:
    """Put the path of the file before the message."""
    error.args = (f"{path}: {error}", *error.args[1:])


def _read(path: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such file; iobench autotune -o {path} writes one") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:  # tomllib's own, and that of too long integers
        raise UsageError(f"{path}: is not TOML ({error})") from error
    schema = document.get("schema")
    family, _, version = schema.partition("/") if isinstance(schema, str) else ("", "", "")
    if family != _FAMILY or not (version.isdecimal() and len(version) < 10):
        raise UsageError(
            f"{path}: schema is {schema!r:.60}; a writer's file says schema = {SCHEMA!r}"
        )
    if int(version) > int(_VERSION):
        raise UsageError(
            f"{path}: schema {schema} is of a newer iobench, this one reads {SCHEMA}; upgrade "
            "iobench, or tune again"
        )
    for key in document:
        if key not in _KEYS:
            raise UnknownNameError(f"key in {path}", key, _KEYS)
    return document


def _check_machine(path: Path, tuned: Tuned) -> None:
    key = str(path.absolute())
    if key in _warned or tuned.fingerprint == machine_fingerprint():
        return
    _warned.add(key)
    warnings.warn(
        f"{path} was tuned on another machine ({printable(tuned.machine)}); its settings work here "
        "but may not be the best: run iobench autotune here",
        RuntimeWarning,
        stacklevel=3,
    )


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    text = str(value).encode("utf-8", "replace").decode()  # a path may contain lone surrogates
    # A basic string of TOML equals one of JSON, except for surrogate pairs and this character.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
