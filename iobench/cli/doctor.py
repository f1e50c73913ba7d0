"""`iobench doctor`: check this machine and one directory, and advise how to fix problems."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from iobench.cli.given import HERE, FormatOption, the_directory
from iobench.report.render import render
from iobench.text import printable
from iobench.units import count_of

if TYPE_CHECKING:
    from iobench.environment import Advice
    from iobench.environment.facts import Fact
    from iobench.report.grid import Grid

SCHEMA = "iobench.doctor/1"

_STYLES = {"warn": "yellow", "fail": "red", "note": "dim"}


def doctor(target: str = HERE, format_: FormatOption = "table") -> None:
    """Check this machine and a directory, and suggest remedies.

    It tries in the directory what the I/O paths need.

    Options:
        --target TARGET: The directory to look at. [here]
    """
    from iobench.environment import advise, describe_machine, describe_storage, probe_directory
    from iobench.environment.facts import Fact
    from iobench.environment.memory import new_pages_bytes_per_s
    from iobench.report.document import Document

    directory = the_directory(target)
    storage = describe_storage(directory)  # first: finds a missing directory at once
    machine = describe_machine()
    memory = replace(machine.memory, new_pages_bytes_per_s=new_pages_bytes_per_s())
    machine = replace(machine, memory=memory)
    probes = probe_directory(directory)
    advice = advise(machine, storage, probes)
    about: dict[str, list[Advice]] = {}
    for item in advice:
        about.setdefault(item.subject, []).append(item)
    tried = [Fact(probe.name, probe.detail, f"probe.{probe.name}") for probe in probes]
    document = Document(
        kind="iobench doctor",
        title=_counts(advice),
        tables=(
            _grid(f"machine {machine.hostname}", machine.facts(), about),
            _grid(f"storage {storage.path}", storage.facts(), about),
            _grid("probes", tried, about),
        ),
        notes=tuple(
            f"trap of {storage.kind} storage: {trap.message}"
            for trap in about.get("storage.trap", ())
        ),
        data={
            "schema": SCHEMA,
            "machine": asdict(machine),
            "storage": asdict(storage),
            "probes": [asdict(probe) for probe in probes],
            "advice": [asdict(item) for item in advice],
        },
    )
    render(document, format_, sys.stdout)


def _counts(advice: Sequence[Advice]) -> str:
    names = {"warn": "warning", "fail": "failure"}
    counts = {level: sum(one.level == level for one in advice) for level in names}
    return ", ".join(count_of(n, names[level]) for level, n in counts.items() if n) or "all is well"


def _grid(title: str, facts: Sequence[Fact], about: Mapping[str, Sequence[Advice]]) -> Grid:
    """Return the table of facts: a mark where one was checked, and its advice below it."""
    from iobench.report.grid import Grid, words

    lines: list[tuple[str, str, str, str]] = []  # mark, name, words, style
    for fact in facts:
        advice = about.get(fact.subject, ())
        levels = [item.level for item in advice]
        mark = next((level for level in ("fail", "warn", "note") if level in levels), "ok")
        lines.append((mark if fact.subject else "", fact.name, fact.words, ""))
        for item in advice:
            if not item.message.endswith(fact.words):  # otherwise the row shows it already
                lines.append(("", "", item.message, _STYLES[item.level]))
            if item.remedy:
                lines.append(("", "", f"-> {item.remedy}", "cyan"))
    return Grid(
        title=printable(title),
        columns=words("", "fact", "value", sentence=True),
        rows=[[printable(text) for text in line[:3]] for line in lines],
        styles=tuple(style for *_, style in lines),
    )
