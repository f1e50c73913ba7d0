"""`iobench writers`: list every writer and peer, whether it works here, and else its remedy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from iobench.cli.given import FormatOption, check_target
from iobench.report.render import render

if TYPE_CHECKING:
    from iobench.peers.base import Peer
    from iobench.report.grid import Grid
    from iobench.writers.base import Availability, Writer
    from iobench.writers.options import OptionInfo

_SHOWN = ("name", "default", "unit", "low", "high", "choices", "help")


def writers(target: str = ".", format_: FormatOption = "table") -> None:
    """List writers and peers, and whether they work here.

    Options and their defaults are listed too. Each writer is tried in the target.

    Options:
        --target TARGET: The directory, or s3://bucket/prefix, to try them in. [here]
    """
    from iobench import peers
    from iobench.environment.storage import check_directory
    from iobench.report.document import Document
    from iobench.writers import registry
    from iobench.writers.s3_store.target import is_s3

    check_target(target)
    if not is_s3(target):
        check_directory(target)
    listed = [_listed(name, registry.writer_class, name, target) for name in registry.names()]
    compared = [
        _listed(f"{peers.PREFIX}{name}", peers.peer_class, name, target) for name in peers.names()
    ]
    document = Document(
        kind="iobench writers",
        title=f"writers and peers in {target}",
        tables=(_grid("writer", listed), _grid("peer", compared)),
        data={"schema": "iobench.writers/1", "writers": listed, "peers": compared},
    )
    render(document, format_, sys.stdout)


def _listed(
    shown: str, load: Callable[[str], type[Writer | Peer]], name: str, target: str
) -> dict[str, Any]:
    """Return the entry of the writer or peer that `load(name)` returns."""
    from iobench.errors import IobenchError
    from iobench.peers.base import Peer
    from iobench.writers.base import Availability

    summary = ""
    options: list[OptionInfo] = []
    try:
        cls = load(name)
        summary, options, one = cls.summary, cls.Options.describe(), cls()
        one.check_scheme(target)
        answer = one.glance() if isinstance(one, Peer) else one.available(target)
    except IobenchError as error:
        answer = Availability(ok=False, reason=str(error))
    return _entry(shown, summary, answer, options)


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
            {name: getattr(info, name) for name in _SHOWN} | {"shown": info.show(info.default)}
            for info in options
        ],
    }


def _grid(what: str, listed: Iterable[dict[str, Any]]) -> Grid:
    """Return the table: what each one is, why it does not work here, and its options."""
    from iobench.report.grid import Grid, words

    rows = []
    for one in listed:
        rows.append([one["name"], "yes" if one["available"] else "no", one["summary"]])
        why = " ".join(part for part in (one["reason"], one["remedy"]) if part)
        options = ", ".join(f"{each['name']}={each['shown']}" for each in one["options"])
        rows += [["", "", text] for text in (why, options) if text]
    columns = words(what, "works", "what it is, and its options", sentence=True)
    return Grid(columns=columns, rows=rows)
