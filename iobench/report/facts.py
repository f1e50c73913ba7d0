"""Where a record was measured and how to repeat it, in words; what makes two records unlike."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from iobench.bench.judging.verdict import repeats_every
from iobench.peers import PREFIX
from iobench.report.document import Section
from iobench.report.grid import Grid, words
from iobench.results import Environment, ResultFile, Run
from iobench.units import GIB, format_size

_UNKNOWN = "unknown"


def moment(text: str) -> str:
    """Return an ISO 8601 time as `2026-01-31 12:00 UTC`."""
    return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M %Z}"


def environment_section(run: Run) -> Section:
    """Return the facts that decide the figures; the record, with all of them, is on the page."""
    measured, target = f"{run.started_at}, run {run.run_id}", run.plan.get("target")
    return facts_section(run.environment, measured, str(target or "storage"))


def facts_section(environment: Environment, measured: str, target: str) -> Section:
    """Return the same of an `environment` in which was `measured`, with one or more targets."""
    rows = [["measured", measured]]
    rows += [[fact.name, fact.words] for fact in environment.machine.facts()]
    for place, storage in (environment.storages or {target: environment.storage}).items():
        rows += [[f"{place}: {fact.name}", fact.words] for fact in storage.facts()]
    grid = Grid(columns=words("fact", "value", sentence=True), rows=rows)
    return Section(heading="Environment", grids=(grid,))


def repeat_section(*records: ResultFile) -> Section:
    """Return the commands, with the seed that gives the same data in the same order."""
    commands = dict.fromkeys(shlex.join(_command(one.run)) for one in records)
    return Section(heading="Repeat it", commands=tuple(commands))


def _command(run: Run) -> Sequence[str]:
    seed = run.plan.get("seed")
    if seed is None or run.command[1:2] != ("run",) or "--seed" in run.command:
        return run.command
    return *run.command, "--seed", str(seed)


def environment_line(environment: Environment) -> str:
    """Return host, kernel, CPU, memory, GPUs and storage in one line, without unknown facts."""
    facts = [*environment.machine.words(), *environment.storage.words()]
    facts += [f"{at}: {' '.join(one.words())}" for at, one in environment.storages.items()]
    return ", ".join(facts) or "machine not known"


def unlike(old: Run, new: Run) -> list[str]:
    """Return in words the differences that make the figures of two runs incomparable.

    Compared are the machine (CPU, CPUs, memory, GPUs), kernel, file system, devices, nodes,
    workload, rank and size, and whether saves follow each other for a time. The rules of the run
    are compared too: CRC32, whether data repeat, and whether the measured time of a restore
    includes the allocation of its memory. The host's name, free space and the versions of packages
    may differ: the comparison may be about them.
    """
    before, after = dict(_deciding(old)), dict(_deciding(new))
    return [
        f"{name}: {before[name]} before, {after[name]} now"
        for name in before
        if name in after and before[name] != after[name]
    ]


def _deciding(run: Run) -> Iterator[tuple[str, str]]:
    """Yield the facts that must be equal, as name and words; `unknown` where a record lacks one."""
    found = run.environment.machine.main_facts()
    total = run.environment.machine.memory.total_bytes
    # A kernel takes a little of it for itself, and not always the same.
    found["memory"] = f"{round(total / GIB)} GiB" if total is not None else None
    found["GPUs"] = found["GPUs"] or "none"
    yield from ((name, one or _UNKNOWN) for name, one in found.items() if name != "host")
    storages = run.environment.storages
    yield "targets", ", ".join(sorted(storages)) or "one"
    for target, storage in (storages or {"": run.environment.storage}).items():
        of = f" of {target}" if target else ""
        yield f"file system{of}", storage.fs_type or _UNKNOWN
        yield f"device{of}", "; ".join(filter(None, map(str, storage.leaves()))) or _UNKNOWN
    yield "nodes", str(run.world.nodes if run.world else 1)
    yield "saves", "for a time" if run.plan.get("round_s") else "in turn with restores"
    yield "workload", f"{run.workload.name}, rank {run.workload.rank}"
    yield "size", f"{format_size(run.workload.bytes)} ({run.workload.bytes} bytes)"
    period = repeats_every(run)
    yield "repeating data", "no" if period is None else f"every {format_size(period)}"
    yield "CRC32 of torch files", _yes(run.plan.get("crc32"))
    writers = run.plan.get("writers")
    names = [one.get("name") for one in writers or () if isinstance(one, Mapping)]
    peers = any(str(name).startswith(PREFIX) for name in names)
    yield "restores into new memory, as with peers", _yes(peers if names else None)


def _yes(value: Any) -> str:
    return _UNKNOWN if value is None else "yes" if value else "no"
