"""`iobench run --tiers FILE`: saves of a workload's size to tiers, one after the other."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from iobench.cli.given import given, the_directory
from iobench.cli.servers import HERE, preparing
from iobench.errors import OptionError, UsageError
from iobench.report.render import ReportFormat, write_json
from iobench.units import count_of, format_seconds, format_size, parse_size

if TYPE_CHECKING:
    from iobench.results import TrainSave

__all__ = ["TiersOption", "run_tiers"]

TiersOption = Annotated[
    Path | None,
    typer.Option(
        "--tiers",
        rich_help_panel="What is varied, and of which rank",
        help="Save to the tiers of this TOML file instead (docs/tiers.md), and show when each tier "
        "has a save.",
    ),
]
_USED = ("tiers", "workload", "workload_option", "writer", "target", "size", "repeat", "format_")
_DEFAULT_SIZE = "1GiB"


def run_tiers(
    ctx: typer.Context,
    tiers: Path,
    *,
    workload: str,
    writer: str | None,
    target: list[str] | None,
    size: str | None,
    repeat: str,
    form: ReportFormat,
    quiet: bool,
) -> None:
    """Save `repeat` times, each when the last one is durable in the local tier, and print times.

    Raises UsageError for options that have no effect here.
    """
    without = [option for name, option in given(ctx) if name not in (*_USED, "quiet")]
    if without:
        raise UsageError(f"{', '.join(without)}: no effect with --tiers; leave it out")
    if form not in (ReportFormat.TABLE, ReportFormat.JSON):
        raise OptionError(f"--format {form}: with --tiers table or json")
    if not repeat.isdecimal() or int(repeat) < 2:
        raise OptionError(f"--repeat {repeat}: with --tiers a number of saves, 2 or more")
    if target is not None and len(target) > 1:
        raise UsageError("--target: with --tiers one directory")
    directory = the_directory(target[0] if target else HERE)
    with preparing("saving to the tiers", quiet=quiet):
        from iobench import workloads

        full = workloads.load(workload)
        found = full if size == "full" else full.scaled(parse_size(size or _DEFAULT_SIZE, "--size"))
        saves, lost_s = _measured(
            tiers, writer or "hybrid", directory, found.size_bytes(), int(repeat)
        )
    if form is ReportFormat.JSON:
        write_json(_document(workload, found.size_bytes(), saves, lost_s), sys.stdout)
        return
    print(f"{workload}: {count_of(len(saves), 'save')} of {format_size(found.size_bytes())}\n")
    for line in _lines(saves, lost_s):
        print(line)


def _measured(
    tiers: Path, writer: str, target: Path, size_bytes: int, repeat: int
) -> tuple[tuple[TrainSave, ...], dict[str, float]]:
    """Return the saves and the most time between two durable ones, by tier."""
    import torch

    from iobench.bench.targets.scratch import scratch_directory
    from iobench.tiers.file import TiersFile
    from iobench.train.arm import Arm
    from iobench.train.tiered_saver import TieredSaver
    from iobench.writers.config import load_writer

    read, by = TiersFile.read(tiers), load_writer(writer)
    by.require(target)
    state = {"tensor": torch.randint(0, 256, (size_bytes,), dtype=torch.uint8)}
    arm = Arm(mode="async", by=by, slots=2, tiers=read)
    with scratch_directory(target) as scratch:
        saver = TieredSaver(arm, read, by, Path(scratch) / "run")
        try:
            for step in range(repeat + 1):  # the first one, not counted, opens connections
                saver.save(state, step)
                saver.wait()
                state["tensor"].add_(1)
            return saver.saves()[1:], saver.lost_s(1)
        finally:
            saver.close()


def _lines(saves: tuple[TrainSave, ...], lost_s: dict[str, float]) -> Iterator[str]:
    yield f"{'save':>4}  {'stall':>9}  {'local':>9}  {'remote':>9}  status"
    for number, one in enumerate(saves, 1):
        times = [one.stall_s, one.durable_s, one.remote_s]
        shown = "  ".join(f"{'-' if s is None else format_seconds(s):>9}" for s in times)
        yield f"{number:>4}  {shown}  {one.status}"
    yield ""
    yield f"stall: {format_seconds(statistics.median(one.stall_s for one in saves))} (median)"
    for tier, above in (("local", "the node"), ("remote", "the local tier")):
        times = [one.durable_s if tier == "local" else one.remote_s for one in saves]
        known = [one for one in times if one is not None]
        if known:
            lost = f", at most {format_seconds(lost_s[tier])} is lost" if tier in lost_s else ""
            yield (
                f"{tier}: durable {format_seconds(statistics.median(known))} after the begin of a "
                f"save{lost}{f' with {above}' if lost else ''}"
            )


def _document(
    workload: str, size_bytes: int, saves: tuple[TrainSave, ...], lost_s: dict[str, float]
) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "schema": "iobench.run-tiers/1",
        "workload": workload,
        "size_bytes": size_bytes,
        "saves": [asdict(one) for one in saves],
        "lost_s": lost_s,
    }
