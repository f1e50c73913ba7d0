"""`iobench writers`: list every writer and peer, whether it works here, and else its remedy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from iobench.cli.given import FormatOption, ListingFormat, check_target
from iobench.report.render import write_json

if TYPE_CHECKING:
    from iobench.peers.base import Peer
    from iobench.writers.availability import Availability
    from iobench.writers.base import Writer
    from iobench.writers.options import OptionInfo


def writers(
    target: Annotated[
        str,
        typer.Option(
            "--target",
            help="The directory, or s3://bucket/prefix, to try them in.",
            show_default="here",
        ),
    ] = ".",
    format_: FormatOption = ListingFormat.TABLE,
) -> None:
    """List writers and peers, and whether they work here.

    Options and their defaults are listed too. Each writer is tried in the target."""
    from iobench import peers
    from iobench.environment.storage import check_directory
    from iobench.writers import registry
    from iobench.writers.s3_store.target import is_s3

    check_target(target)
    if not is_s3(target):
        check_directory(target)
    listed = [_listed(name, registry.writer_class, name, target) for name in registry.names()]
    compared = [
        _listed(f"{peers.PREFIX}{name}", peers.peer_class, name, target) for name in peers.names()
    ]
    if format_ is ListingFormat.JSON:
        document = {"schema": "iobench.writers/1", "writers": listed, "peers": compared}
        write_json(document, sys.stdout)
        return
    width = max(len(entry["name"]) for entry in (*listed, *compared))
    _print(listed, width)
    print()
    _print(compared, width)


def _listed(
    shown: str, load: Callable[[str], type[Writer | Peer]], name: str, target: str
) -> dict[str, Any]:
    """Return the entry of the writer or peer that `load(name)` returns."""
    from iobench.errors import IobenchError
    from iobench.writers.availability import Availability

    try:
        cls = load(name)
        answer = _available(cls(), target)
    except IobenchError as error:
        return _entry(shown, "", Availability(ok=False, reason=str(error)), ())
    return _entry(shown, cls.summary, answer, cls.Options.describe())


def _available(one: Writer | Peer, target: str) -> Availability:
    from iobench.errors import UsageError
    from iobench.peers.base import Peer
    from iobench.writers.availability import Availability

    try:
        one.check_scheme(target)
    except UsageError:
        remedy = "Give --target s3://bucket/prefix." if "s3" in one.schemes else ""
        kind = "buckets" if "s3" in one.schemes else "directories"
        return Availability(ok=False, reason=f"it stores in {kind} only.", remedy=remedy)
    return one.glance() if isinstance(one, Peer) else one.available(target)


def _entry(
    name: str, summary: str, answer: Availability, options: Iterable[OptionInfo]
) -> dict[str, Any]:
    return {
        "name": name,
        "summary": summary,
        "available": answer.ok,
        "reason": answer.reason,
        "remedy": answer.remedy,
        "options": [
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
            for info in options
        ],
    }


def _print(listed: list[dict[str, Any]], width: int) -> None:
    from rich.text import Text

    from iobench.report.grid import console_for, print_wrapped, wrapped

    console = console_for(sys.stdout)
    indent = " " * (width + 7)
    for entry in listed:
        mark, style = ("yes", "green") if entry["available"] else ("no", "red")
        line = f"{entry['name']:{width}}  {mark:3}  {entry['summary']}"
        shown = Text(wrapped(line, console.width, indent))
        shown.stylize("bold", 0, width)
        shown.stylize(style, width + 2, width + 2 + len(mark))
        console.print(shown, soft_wrap=True)
        why = " ".join(part for part in (entry["reason"], entry["remedy"]) if part)
        if why:
            print_wrapped(console, indent + why, indent=indent)
        if entry["options"]:
            options = ", ".join(f"{o['name']}={o['shown']}" for o in entry["options"])
            print_wrapped(console, indent + options, indent=indent, style="dim")
