"""Optimizers side by side as tables, Markdown or JSON (`iobench.train.optimizer/1`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TextIO

from iobench.bench.judging.stats import median
from iobench.claims.offloaded import OffloadFinding
from iobench.report.grid import Grid
from iobench.report.render import DocumentFormat, write_grids, write_json
from iobench.train.optimizer_record import MeasuredOptimizer, OptimizerRecord
from iobench.units import format_seconds, format_size

__all__ = ["checkpoint_rows", "claims_grid", "heading", "notes", "optimizer_grids", "write"]

_WARM = 0.01
"""Part of the bytes of a restore that may be in the page cache."""
_STEPS = (
    *(("optimizer", False), ("step", True), ("of it\nupdate", True), ("memory", True)),
    *(("written\na step", True), ("same\nlosses", False)),
)
_CHECKPOINTS = (
    *(("checkpoint", False), ("stall", True), ("durable\nafter", True), ("written", True)),
    *(("part of\nthe state", True), ("restore", True), ("read", True), ("part of\nit", True)),
    ("same\nbits", False),
)


def write(record: OptimizerRecord, form: DocumentFormat, stream: TextIO) -> None:
    """Write heading, tables and notes. JSON is the record: every sample, in bytes and seconds."""
    if form is DocumentFormat.JSON:
        write_json(record.to_json(), stream)
        return
    write_grids(form, [heading(record)], optimizer_grids(record), notes(record.optimizers), stream)


def heading(about: OptimizerRecord) -> str:
    """Return what was trained."""
    return (
        f"{about.parameters:,} parameters in bfloat16, a state of "
        f"{format_size(about.state_bytes)}; medians of {about.repeat} blocks of {about.steps} steps"
    )


def claims_grid(findings: Sequence[OffloadFinding]) -> Grid:
    """Return a row for each claim."""
    return Grid(
        columns=(("claim", False), ("here", True), ("holds", False), ("why", False)),
        rows=[[one.text, one.ours, one.answer.value, one.reason] for one in findings],
        sentences=(3, 0),
    )


def optimizer_grids(about: OptimizerRecord) -> Iterator[Grid]:
    """Yield the tables of the steps and of the checkpoints."""
    rows = [
        [
            one.name,
            format_seconds(median(one.step_s)),
            format_seconds(median(one.update_s)),
            format_size(one.memory_bytes),
            format_size(median(one.written_bytes_per_step)),
            "yes" if one.losses_equal else "NO",
        ]
        for one in about.optimizers
    ]
    yield Grid(columns=_STEPS, rows=rows)
    yield Grid(columns=_CHECKPOINTS, rows=checkpoint_rows(about), drop=(5, 2))


def checkpoint_rows(about: OptimizerRecord) -> list[list[str]]:
    """Return a row for each way to make a checkpoint."""
    rows = []
    for one in about.optimizers:
        for method in dict.fromkeys(c.method for c in one.checkpoints):
            own = [c for c in one.checkpoints if c.method == method]
            restores = [r for r in one.restores if r.method == method]
            written = median([c.written_bytes for c in own])
            read = median([r.read_bytes for r in restores])
            rows.append(
                [
                    f"{one.name} {method}",
                    format_seconds(median([c.stall_s for c in own])),
                    format_seconds(median([c.durable_s for c in own])),
                    format_size(written),
                    f"{written / about.state_bytes:.2%}",
                    format_seconds(median([r.elapsed_s for r in restores])),
                    format_size(read),
                    f"{read / about.state_bytes:.1%}",
                    "yes" if all(r.equal for r in restores) else "NO",
                ]
            )
    return rows


def notes(found: Sequence[MeasuredOptimizer]) -> Iterator[str]:
    """Yield how to read the tables, and what spoils them."""
    yield (
        "step: a block over its steps, until the state of all of them is durable where it is on "
        "storage; mmap calls no msync in a step. memory: what the optimizer added to the process, "
        "mapped files included"
    )
    yield (
        "written, read: by this process (/proc/self/io). restore: with an empty page cache, until "
        "the parameters are there"
    )
    by_method: dict[str, list[int]] = {}
    warm = []
    for one in found:
        for restore in one.restores:
            if restore.device_bytes is not None:
                by_method.setdefault(restore.method, []).append(restore.device_bytes)
            if restore.cached_bytes > _WARM * restore.read_bytes:
                warm.append(restore.method)
    if by_method:
        read = [f"{name} {format_size(median(sizes))}" for name, sizes in by_method.items()]
        yield f"read by the device's own counter, for all processes: {', '.join(read)}"
    if warm:
        names = ", ".join(dict.fromkeys(warm))
        yield f"the page cache kept files of {names}: their restores are too fast"
