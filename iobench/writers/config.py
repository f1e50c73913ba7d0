"""A writer as a TOML file: what a tuner emits and a trainer loads."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

from iobench.errors import UsageError
from iobench.writers import registry
from iobench.writers.base import Writer

__all__ = ["SCHEMA", "dump_writer", "load_writer"]

SCHEMA = "iobench.writer/1"


def dump_writer(writer: Writer) -> str:
    """The TOML text from which `load_writer` makes an equal writer."""
    lines = [f'schema = "{SCHEMA}"', f'writer = "{writer.name}"', "", "[options]"]
    for info in writer.options.describe():
        value = getattr(writer.options, info.name)
        shown = info.show(value) if info.unit == "bytes" else value
        lines.append(f"{info.name} = {_toml(shown)}")
    return "\n".join(lines) + "\n"


def load_writer(name_or_path: str | os.PathLike[str], **overrides: Any) -> Writer:
    """The writer of that name, or of that TOML file; `overrides` set options over the file's.

    A text that ends in `.toml` or holds a `/` is a path. Raises UsageError for a file that is no
    writer's, UnknownNameError and OptionError for what it names, UnavailableError for a writer
    that cannot be imported.
    """
    text = os.fspath(name_or_path)
    if not (text.endswith(".toml") or "/" in text):
        return registry.make(text, **overrides)
    document = _read(Path(text))
    try:
        return registry.make(document["writer"], **{**document.get("options", {}), **overrides})
    except UsageError as error:
        error.add_note(f"in {text}")
        raise


def _read(path: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: is no TOML ({error})") from error
    if document.get("schema") != SCHEMA:
        raise UsageError(
            f"{path}: schema is {document.get('schema')!r}, this iobench reads {SCHEMA!r}; "
            "upgrade iobench if the file is newer"
        )
    if not isinstance(document.get("writer"), str) or not isinstance(
        document.get("options", {}), dict
    ):
        raise UsageError(f"{path}: must have writer = NAME and may have a table [options]")
    unknown = set(document) - {"schema", "writer", "options"}
    if unknown:
        raise UsageError(f"{path}: unknown {', '.join(sorted(unknown))}")
    return document


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    return json.dumps(value)  # a basic string of TOML is one of JSON
