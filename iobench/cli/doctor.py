"""`iobench doctor`: check this machine and one directory, and advise how to fix problems."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from iobench.cli.given import HERE, FormatOption, ListingFormat, the_directory
from iobench.report.render import write_json
from iobench.text import printable
from iobench.units import KIB, count_of, format_rate, format_size

if TYPE_CHECKING:
    from rich.console import Console

    from iobench.environment import Advice, Probe

SCHEMA = "iobench.doctor/1"

_STYLES = {"ok": "green", "warn": "yellow", "fail": "red", "note": "dim", "": ""}
_LABEL_WIDTH = 16
_INDENT = " " * (2 + 4 + 2 + _LABEL_WIDTH + 1)
_Row = tuple[str, str, str | None]  # subject of advice, label, text; None is not shown


def doctor(
    target: Annotated[
        str, typer.Option("--target", help="The directory to look at.", show_default="here")
    ] = HERE,
    format_: FormatOption = ListingFormat.TABLE,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 for any warning or failure.")
    ] = False,
) -> None:
    """Check this machine and a directory, and suggest remedies.

    It tries in the directory what the I/O paths need."""
    from iobench.environment import advise, describe_machine, describe_storage, probe_directory
    from iobench.environment.memory import host_takes_free_memory, new_pages_bytes_per_s

    directory = the_directory(target)
    storage = describe_storage(directory)  # first: finds a missing directory at once
    machine = describe_machine()
    machine["memory"] |= {
        "host_takes_free_memory": host_takes_free_memory(),
        "new_pages_bytes_per_s": new_pages_bytes_per_s(),
    }
    probes = probe_directory(directory)
    advice = advise(machine, storage, probes)
    if format_ is ListingFormat.JSON:
        document = {
            "schema": SCHEMA,
            "machine": machine,
            "storage": storage,
            "probes": [asdict(probe) for probe in probes],
            "advice": [asdict(item) for item in advice],
        }
        write_json(document, sys.stdout)
    else:
        _print_table(machine, storage, probes, advice)
    if strict and any(item.level in ("warn", "fail") for item in advice):
        raise typer.Exit(1)


def _print_table(
    machine: dict[str, Any],
    storage: dict[str, Any],
    probes: list[Probe],
    advice: list[Advice],
) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    about: dict[str, list[Advice]] = {}
    for item in advice:
        about.setdefault(item.subject, []).append(item)
    sections: tuple[tuple[str, Iterator[_Row]], ...] = (
        (f"machine {machine['hostname']}", _machine_rows(machine)),
        (f"storage {storage['path']}", _storage_rows(storage)),
        ("probes", ((f"probe.{probe.name}", probe.name, probe.detail) for probe in probes)),
    )
    for title, rows in sections:
        console.print(_printable(title), style="bold")
        for subject, label, text in rows:
            _print_row(console, label, text, about.get(subject, []), checked=subject != "")
        console.print()
    traps = about.get("storage.trap", [])
    if traps:
        console.print(f"traps of {storage['kind']} storage", style="bold")
        for trap in traps:
            _print_wrapped(console, "  - ", "    ", trap.message, "")
        console.print()
    worse = {level: sum(a.level == level for a in advice) for level in ("warn", "fail")}
    names = {"warn": "warning", "fail": "failure"}
    counts = [count_of(n, names[level]) for level, n in worse.items() if n]
    console.print(", ".join(counts) if counts else "all is well")


def _print_row(
    console: Console, label: str, text: str | None, advice: list[Advice], *, checked: bool
) -> None:
    if text is None:
        return
    levels = [item.level for item in advice]
    mark = next((level for level in ("fail", "warn", "note") if level in levels), "ok")
    mark = mark if checked else ""
    console.print("  ", end="")
    console.print(f"{mark:<4}", style=_STYLES[mark], end="")
    console.print("  ", end="")
    head = f"{label:<{_LABEL_WIDTH}} "
    _print_wrapped(console, head, _INDENT, text, "")
    for item in advice:
        if not item.message.endswith(text):  # otherwise the row shows it already
            _print_wrapped(console, _INDENT, _INDENT, item.message, _STYLES[item.level])
        if item.remedy:
            _print_wrapped(console, f"{_INDENT}-> ", f"{_INDENT}   ", item.remedy, "cyan")


def _print_wrapped(console: Console, first: str, rest: str, text: str, style: str) -> None:
    """Print `text` wrapped at the width of a terminal; into a pipe as one line, easy to search.

    `first` is in front of the first line, `rest` is as wide as all that is in front of it.
    """
    from iobench.report.grid import wrapped

    text = _printable(text)
    if console.is_terminal:
        text = wrapped(text, max(console.width, 60) - len(rest)).replace("\n", f"\n{rest}")
    console.print(first + text, style=style)


def _printable(text: str) -> str:
    """Return `text` with escapes for what stdout cannot encode or print, as in file names."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return printable(text).encode(encoding, "backslashreplace").decode(encoding)


def _machine_rows(machine: dict[str, Any]) -> Iterator[_Row]:
    cpu, memory, limits = machine["cpu"], machine["memory"], machine["cgroup"]
    versions, virtual = machine["versions"], machine["virtualisation"]
    cores = f"{cpu['usable_cpus']} of {cpu['logical_cpus']} CPUs"
    nodes = f", {cpu['numa_nodes']} NUMA nodes" if (cpu["numa_nodes"] or 1) > 1 else ""
    yield "", "cpu", f"{cpu['model']}, {cores}{nodes}"
    yield "cpu.governor", "governor", cpu["governor"]
    if memory["total_bytes"] is not None and memory["available_bytes"] is not None:
        text = f"{format_size(memory['total_bytes'])}"
        text += f", {format_size(memory['available_bytes'])} available"
        if limits["memory_limit_bytes"] is not None:
            text += f", control group allows {format_size(limits['memory_limit_bytes'])}"
        if memory["swap_total_bytes"]:
            text += f", swap {format_size(memory['swap_total_bytes'])}"
        yield "memory", "memory", text
    yield "memory.pages", "new pages", format_rate(memory["new_pages_bytes_per_s"])
    cache = machine["page_cache"]
    yield "", "dirty limits", f"{_dirty(cache, 'background_')} background, {_dirty(cache, '')} hard"
    yield "", "runs in", _inside(virtual)
    yield "", "system", machine["distribution"]
    yield "", "kernel", machine["kernel"]
    ring = machine["io_uring"]
    yield "io_uring", "io_uring", "a ring was set up" if ring["works"] else ring["reason"]
    yield "", "python", versions["python"]
    torch = versions["torch"]
    cuda = f", built for CUDA {versions['torch_cuda']}" if versions["torch_cuda"] else ""
    yield "torch", "torch", f"{torch}{cuda}" if torch else "missing"
    yield "fio", "fio", versions["fio"] or "missing"
    for gpu in machine["gpus"]:
        size = f", {format_size(gpu['memory_bytes'])}" if gpu["memory_bytes"] else ""
        yield "", "gpu", f"{gpu['name']}{size}, driver {gpu['driver'] or 'unknown'}"
    yield ("gds" if machine["gpus"] else ""), "gpudirect", machine["gds"]["state"]
    yield "", "fingerprint", machine["fingerprint"]


def _dirty(cache: dict[str, Any], which: str) -> str:
    """Return the limit in force: bytes if they are set, else percent of available memory."""
    size = cache[f"dirty_{which}bytes"]
    return format_size(size) if size else f"{cache[f'dirty_{which}ratio']}%"


def _inside(virtual: dict[str, Any]) -> str | None:
    parts = []
    if virtual["container"]:
        parts.append(f"{virtual['container']} container")
    if virtual["hypervisor"]:
        parts.append(f"virtual machine ({virtual['hypervisor']})")
    return ", ".join(parts) or None


def _storage_rows(storage: dict[str, Any]) -> Iterator[_Row]:
    yield "storage.kind", "kind", storage["kind"]
    if storage["fs_type"]:
        where = f"{storage['fs_type']} on {storage['mount_point']} from {storage['source']}"
        yield "", "file system", where
    yield "storage.options", "mount options", ", ".join(storage["mount_options"]) or None
    if storage.get("upper"):
        upper = storage["upper"]
        yield "", "upper directory", f"{upper['fs_type']} on {upper['mount_point']}"
    free, total = storage["free_bytes"], storage["total_bytes"]
    used = f", {storage['used_ratio']:.0%} used" if storage["used_ratio"] is not None else ""
    yield "storage.free", "free space", f"{format_size(free)} of {format_size(total)}{used}"
    if storage["inodes_free"] is not None:
        yield "storage.inodes", "free inodes", str(storage["inodes_free"])
    yield from _device_rows(storage["device"], depth=0)


def _device_rows(device: dict[str, Any] | None, depth: int) -> Iterator[_Row]:
    if device is None:
        return
    words = [
        device["name"],
        device["type"],
        device["transport"],
        device["model"],
        format_size(device["size_bytes"]) if device["size_bytes"] else None,
        f"file {device['backing_file']}" if device["backing_file"] else None,
    ]
    pad = "  " * depth
    yield "storage.device" if depth == 0 else "", f"{pad}device", ", ".join(w for w in words if w)
    limits = {
        "scheduler": device["scheduler"],
        "requests": device["nr_requests"],
        "largest": device["max_sectors_kb"] and format_size(device["max_sectors_kb"] * KIB),
        "read-ahead": device["read_ahead_kb"] and format_size(device["read_ahead_kb"] * KIB),
        "cache": device["write_cache"],
    }
    queue = ", ".join(f"{name} {value}" for name, value in limits.items() if value)
    yield "", f"{pad}queue", queue or None
    blocks = (device["logical_block_bytes"], device["physical_block_bytes"])
    if all(blocks):
        yield "", f"{pad}blocks", f"{blocks[0]} B logical, {blocks[1]} B physical"
    for part in device["backing"]:
        yield from _device_rows(part, depth + 1)
