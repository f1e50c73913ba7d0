"""The parts of a page that say where, how and how well a run was measured, and how to repeat it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from iobench.environment.storage import leaf_devices
from iobench.report.alike import part_of
from iobench.report.document import Section
from iobench.report.grid import Grid
from iobench.results import Environment, ResultFile, Run, to_plain
from iobench.units import format_size

__all__ = [
    "commands_section",
    "environment_section",
    "facts_section",
    "repeat_section",
]

_MISSING = "not recorded"


def environment_section(run: Run) -> Section:
    """Return the facts that decide the figures, and folded all facts of the record."""
    measured, target = f"{run.started_at}, run {run.run_id}", run.plan.get("target")
    return facts_section(run.environment, measured, str(target or "storage"))


def facts_section(environment: Environment, measured: str, target: str) -> Section:
    """Return the same of an `environment` in which was `measured`, with one or more targets."""
    columns = (("fact", False), ("value", False))
    rows = [["measured", measured], *([name, one] for name, one in _facts(environment, target))]
    every = [
        [name, value]
        for part in ("machine", "storage", "storages")
        for name, value in _flat(to_plain(getattr(environment, part)), part)
    ]
    shown = Grid(columns=columns, rows=rows, sentences=(1,))
    facts = Section(
        heading="All recorded facts",
        grids=(Grid(columns=columns, rows=every, sentences=(1,)),),
        folded=True,
    )
    return Section(heading="Environment", grids=(shown,), sections=(facts,))


def repeat_section(run: Run) -> Section:
    """Return the exact command, and what else decides what a run writes."""
    version = part_of(run.environment.machine, "versions").get("iobench")
    seed = run.plan.get("seed")
    paragraphs = []
    if version:
        paragraphs.append(f"This run was made by iobench {version}.")
    if seed is not None and "--seed" not in run.command:
        paragraphs.append(f"--seed {seed} gives the same data in the same order.")
    return Section(
        heading="Repeat it", paragraphs=tuple(paragraphs), commands=(shlex.join(run.command),)
    )


def commands_section(records: Iterable[ResultFile]) -> Section:
    """Return the section with the commands that made `records`."""
    commands = dict.fromkeys(shlex.join(one.run.command) for one in records)
    return Section(heading="Repeat it", commands=tuple(commands))


def _facts(environment: Environment, target: str) -> Iterator[tuple[str, str]]:
    machine = environment.machine
    cpu, memory = part_of(machine, "cpu"), part_of(machine, "memory")
    yield "machine", _words(machine.get("hostname"), machine.get("distribution"))
    yield "kernel", _words(machine.get("kernel"))
    cpus = cpu.get("usable_cpus")
    yield "CPU", _words(cpu.get("model"), f"{cpus} usable CPUs" if cpus else None)
    total = memory.get("total_bytes")
    yield "memory", format_size(total) if isinstance(total, int) else _MISSING
    gpus = machine.get("gpus")
    listed = gpus if isinstance(gpus, list) else []
    names = [str(one.get("name")) for one in listed if isinstance(one, Mapping)]
    yield "GPUs", ", ".join(names) or "none"
    storages = environment.storages or {target: environment.storage}
    for place, storage in storages.items():
        yield place, _words(storage.get("fs_type") or storage.get("kind"), storage.get("source"))
        options = storage.get("mount_options")
        if isinstance(options, list):
            yield f"{place}: mount options", ", ".join(map(str, options))
        devices = [_device(one) for one in leaf_devices(storage.get("device"))]
        yield f"{place}: device", "; ".join(devices) or _MISSING
    versions = part_of(machine, "versions")
    yield "versions", ", ".join(f"{name} {one}" for name, one in versions.items() if one)


def _device(one: Mapping[str, Any]) -> str:
    size = one.get("size_bytes")
    known = (
        *(one.get("name"), one.get("type"), one.get("model")),
        format_size(size) if isinstance(size, int) else None,
        f"scheduler {one['scheduler']}" if one.get("scheduler") else None,
        f"write cache: {one['write_cache']}" if one.get("write_cache") else None,
    )
    return _words(*known)


def _words(*known: Any) -> str:
    return ", ".join(str(one) for one in known if one) or _MISSING


def _flat(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield every fact below `value` with its path, such as `machine.cpu.model`."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _flat(one, f"{name}.{key}")
    elif isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
        for position, one in enumerate(value):
            yield from _flat(one, f"{name}[{position}]")
    else:
        yield name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)
