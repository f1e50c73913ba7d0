"""The plan of optimizer state on SSDs as a table, Markdown or JSON (`iobench.plan.offload/1`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from iobench.goodput.offloading import MOVED_BYTES, Offloading
from iobench.report.grid import Grid
from iobench.report.render import DocumentFormat, write_grids, write_json
from iobench.units import count_of, format_rate, format_seconds, format_size

__all__ = ["SCHEMA", "write"]

SCHEMA = "iobench.plan.offload/1"

_COLUMNS = (
    *(("nodes", True), ("memory\nsaved", True), ("moved\na step", True), ("stream", True)),
    *(("needed rate", True), ("step during\nbackward", True), ("step after\nbackward", True)),
    *(("written\na day", True), ("SSD life", True)),
)
_DROPPED_FIRST = (6, 4, 1)


def write(title: str, found: Sequence[Offloading], form: DocumentFormat, stream: TextIO) -> None:
    """Write one row for each number of nodes. JSON has bytes and seconds, unrounded."""
    if form is DocumentFormat.JSON:
        plans = [_document(one) for one in found]
        write_json({"schema": SCHEMA, "title": title, "plans": plans}, stream)
        return
    grid = Grid(columns=_COLUMNS, rows=[_row(one) for one in found], drop=_DROPPED_FIRST)
    write_grids(form, _heading(title, found), [grid], _notes(found), stream)


def _document(one: Offloading) -> dict[str, Any]:
    return {
        "parameters": one.parameters,
        "nodes": one.nodes,
        "elements_per_node": one.elements,
        "rate_bytes_per_s": one.rate_bytes_per_s,
        "step_s": one.step_s,
        "backward_s": one.backward_s,
        "pays": one.pays,
        "memory_saved_bytes": one.memory_saved_bytes,
        "moved_bytes_per_step": one.moved_bytes,
        "stream_s": one.stream_s,
        "needed_rate_bytes_per_s": one.needed_rate_bytes_per_s,
        "step_during_backward_s": one.hidden_step_s,
        "step_after_backward_s": one.serial_step_s,
        "written_bytes_per_step": one.written_bytes,
        "written_bytes_per_day": one.written_per_day_bytes,
        "rated_bytes": one.rated_bytes,
        "life_days": one.life_days,
        "pin_bytes": 0,
        "checkpoint_bytes": one.state_bytes,
        "restore_bytes": one.restore_bytes,
    }


def _heading(title: str, found: Sequence[Offloading]) -> Iterator[str]:
    for one in found if len(found) == 1 else (found[0], found[-1]):
        where = "" if len(found) == 1 else f"On {count_of(one.nodes, 'node')}: "
        if one.pays:
            answer = "offloaded state adds no time to a step whose stream runs during backward"
        else:
            added = one.hidden_step_s / one.step_s - 1
            answer = f"offloaded state makes a step at least {added:.1%} longer"
        text = (
            f"{where}{answer}: {MOVED_BYTES} B x {one.elements:,} parameters take "
            f"{format_seconds(one.stream_s)}, backward {format_seconds(one.backward_s)}."
        )
        yield text[0].upper() + text[1:]
    one = found[0]
    yield (
        f"{title}; forward and backward {format_seconds(one.step_s)}; the SSDs of a node move "
        f"{format_rate(one.rate_bytes_per_s)}"
    )


def _row(one: Offloading) -> list[str]:
    return [
        f"{one.nodes:,}",
        format_size(one.memory_saved_bytes),
        format_size(one.moved_bytes),
        format_seconds(one.stream_s),
        format_rate(one.needed_rate_bytes_per_s),
        format_seconds(one.hidden_step_s),
        format_seconds(one.serial_step_s),
        f"{one.written_per_day_bytes / 1e12:,.2f} TB",
        "-" if one.life_days is None else _life(one.life_days),
    ]


def _life(days: float) -> str:
    return f"{days / 365:,.1f} years" if days >= 2 * 365 else f"{days:,.1f} days"


def _notes(found: Sequence[Offloading]) -> Iterator[str]:
    one = found[0]
    yield (
        "memory saved: 12 B for each parameter; the engine takes its `memory` (2 GiB by default). "
        "needed rate: with it, backward hides the stream"
    )
    yield (
        f"a checkpoint (a pin) writes 0 B; a whole one has {format_size(one.state_bytes)} a node. "
        f"A restart reads {format_size(one.restore_bytes)} before the first step, "
        f"{format_seconds(one.restore_bytes / one.rate_bytes_per_s)} at that rate instead of "
        f"{format_seconds(one.state_bytes / one.rate_bytes_per_s)}"
    )
    yield (
        "every step writes 14 B for each parameter, whether a checkpoint is needed or not"
        if one.rated_bytes is not None
        else "SSD life: give --rated-writes, the bytes that the SSDs of a node are rated to write "
        "(TBW)"
    )
