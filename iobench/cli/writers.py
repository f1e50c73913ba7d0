"""`iobench writers`: every writer, whether it works here, and if not why and what to do."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from iobench.cli.formats import Format, FormatOption

if TYPE_CHECKING:
    from iobench.writers.availability import Availability
    from iobench.writers.base import Writer


def writers(
    target: Annotated[
        str,
        typer.Option(
            "--target",
            help="The directory, or s3://bucket/prefix, to try them in.",
            show_default="here",
        ),
    ] = ".",
    format_: FormatOption = Format.TABLE,
) -> None:
    """List every writer, its options, and whether it works here (found by trying)."""
    from iobench.errors import IobenchError, TargetError
    from iobench.writers import registry
    from iobench.writers.availability import Availability
    from iobench.writers.s3_target import is_s3

    if not is_s3(target) and not Path(target).is_dir():
        raise TargetError(f"--target {target}: no such directory")
    listed: list[dict[str, Any]] = []
    for name in registry.names():
        try:
            cls = registry.writer_class(name)
            answer = _available(cls(), target)
        except IobenchError as error:
            listed.append(_entry(name, "", Availability(ok=False, reason=str(error)), []))
            continue
        options = [
            {
                "name": info.name,
                "default": info.default,
                "unit": info.unit,
                "low": info.low,
                "high": info.high,
                "choices": list(info.choices),
                "help": info.help,
                "shown": info.show(info.default),
            }
            for info in cls.Options.describe()
        ]
        listed.append(_entry(name, cls.summary, answer, options))
    if format_ is Format.JSON:
        json.dump({"schema": "iobench.writers/1", "writers": listed}, sys.stdout, indent=1)
        print()
    else:
        _print(listed)


def _available(writer: Writer, target: str) -> Availability:
    from iobench.errors import UsageError
    from iobench.writers.availability import Availability

    try:
        writer.check_scheme(target)
    except UsageError:
        remedy = "Give --target s3://bucket/prefix." if "s3" in writer.schemes else ""
        kind = "buckets" if "s3" in writer.schemes else "directories"
        return Availability(ok=False, reason=f"it stores in {kind} only.", remedy=remedy)
    return writer.available(target)


def _entry(name: str, summary: str, answer: Any, options: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": name,
        "summary": summary,
        "available": answer.ok,
        "reason": answer.reason,
        "remedy": answer.remedy,
        "options": options,
    }


def _print(listed: list[dict[str, Any]]) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, markup=False)
    width = max(len(entry["name"]) for entry in listed)
    for entry in listed:
        mark = ("yes", "green") if entry["available"] else ("no", "red")
        console.print(f"{entry['name']:{width}}  ", end="", style="bold")
        console.print(f"{mark[0]:3}", end="  ", style=mark[1])
        console.print(entry["summary"])
        indent = " " * (width + 7)
        why = " ".join(part for part in (entry["reason"], entry["remedy"]) if part)
        if why:
            console.print(indent + why)
        if entry["options"]:
            shown = ", ".join(f"{o['name']}={o['shown']}" for o in entry["options"])
            console.print(indent + shown, style="dim")
