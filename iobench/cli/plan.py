"""`iobench plan`: compute from measured times how often a training job should save."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from iobench.cli.given import (
    ReportFormatOption,
    WorkloadArgument,
    check_effect,
    read_record,
    the_workload,
)
from iobench.cli.pages import Shown
from iobench.errors import OptionError, UsageError
from iobench.units import count_of, parse_seconds, parse_size

if TYPE_CHECKING:
    from iobench.goodput.goodput import TrainingJob
    from iobench.goodput.measured import SavingMethod
    from iobench.results import ResultFile
    from iobench.workloads import Workload


def plan(
    ctx: typer.Context,
    workload: WorkloadArgument = None,
    workload_: str | None = None,
    nodes: str | None = None,
    results: Path | None = None,
    save: str | None = None,
    restore: str | None = None,
    blocking: str | None = None,
    gpus_per_node: int = 8,
    failures_per_1000_node_days: float = 6.5,
    restart: str = "5min",
    step: str | None = None,
    interval: str | None = None,
    size: str | None = None,
    format_: ReportFormatOption = "table",
) -> None:
    """Compute how often a job should save, and what that costs.

    Times come from a result file (--results run.jsonl) or by hand: --save 30s --restore 60s. With
    --blocking 2s it plans asynchronous saves too, which take as long in the background.

    Options:
        --workload, -w WORKLOAD: Plan for this workload: its size, with --results, and its published
            step time. [that of --results]
        --nodes N,...: Nodes of the job: 2048, a list 64,512,2048, or 1024-131072 (doubling).
            Required.
        --results FILE: Plan with the times measured in this result file.
        --save TIME: Without results: how long a save takes (30s, 2min).
        --restore TIME: Without results: how long a restore takes.
        --blocking TIME: Plan asynchronous saves too: how long the snapshot stops training.
        --gpus-per-node N: GPUs of each node.
        --failures-per-1000-node-days N: How often nodes fail; the default is that of a large A100
            cluster (arXiv 2410.21680).
        --restart TIME: Time from a failure to the start of the restore.
        --step WHEN: Time of a training step: intervals are shown in steps too. [the published one
            of the workload]
        --interval TIME: Also ETTR for this training time between two saves (30min).
        --size SIZE: Bytes that each node saves (75GiB). [the files of its ranks, at full size]
    """
    if nodes is None:
        raise UsageError("give --nodes: the nodes of the job")
    shown = Shown(form=format_)
    from iobench.goodput.forecast import forecast
    from iobench.goodput.goodput import TrainingJob
    from iobench.goodput.measured import from_results
    from iobench.report.plan import plan_document

    jobs = [
        TrainingJob(
            nodes=count,
            gpus_per_node=gpus_per_node,
            failures_per_1000_node_days=failures_per_1000_node_days,
            restart_s=parse_seconds(restart, "--restart"),
        )
        for count in node_counts(nodes)
    ]
    chosen = the_workload(workload, workload_, "") or None
    blocking_s = None if blocking is None else parse_seconds(blocking, "--blocking")
    measured = None if results is None else read_record(results)
    planned = _workload(chosen, measured)
    if measured is None:
        check_effect(ctx, ("size",), "only --results has samples")
        title, notes = "times given by hand", list[str]()
        candidates = _by_hand(save, restore, blocking_s)
    else:
        check_effect(ctx, ("save", "restore"), "--results has the measured times")
        size_bytes = _node_bytes(size, planned, gpus_per_node)
        candidates, notes = from_results(measured, size_bytes=size_bytes, blocking_s=blocking_s)
        title = f"{measured.run.workload.name} as measured in {results}"
        if chosen not in (None, measured.run.workload.name):
            title = f"{chosen}, by the rates of {title}"
    step_s, interval_s = _above_zero(step, "--step"), _above_zero(interval, "--interval")
    if planned is not None:
        notes += _too_many_nodes(planned, jobs)
        if step_s is None and planned.step_time:
            step_s = planned.step_time.seconds
    base = _baseline(candidates)
    forecasts = [one for job in jobs for one in forecast(candidates, base, job, interval_s)]
    document = plan_document(
        forecasts, title=title, step_s=step_s, interval_s=interval_s, notes=notes, result=measured
    )
    shown.show(document)


def _workload(chosen: str | None, measured: ResultFile | None) -> Workload | None:
    """Return the workload that was given, or else that of the record where it is here."""
    from iobench import workloads
    from iobench.verification.imported import load_workload

    if chosen is not None:
        return load_workload(chosen)
    recorded = measured.run.workload.name if measured else ""
    return workloads.load(recorded) if recorded in workloads.names() else None


def _too_many_nodes(workload: Workload, jobs: Sequence[TrainingJob]) -> Iterator[str]:
    """Yield a warning if a job has more GPUs than the workload has ranks: there is no such job."""
    from iobench import workloads

    ranks, gpus = workload.world_size, max(job.gpus for job in jobs)
    if workload.name in workloads.names() and gpus > ranks:
        fits = max(1, ranks // jobs[0].gpus_per_node)
        yield (
            f"warning: {workload.name} has {count_of(ranks, 'rank')}, one on each GPU, and "
            f"{max(job.nodes for job in jobs):,} nodes have {gpus:,}: no such job exists; give "
            f"--nodes {fits}, or a workload of more ranks (iobench workloads list)"
        )


def _by_hand(save: str | None, restore: str | None, blocking_s: float | None) -> list[SavingMethod]:
    from iobench.goodput.measured import by_hand

    if save is None or restore is None:
        raise UsageError("give --results FILE, or times by hand: --save and --restore")
    return by_hand(
        save_s=parse_seconds(save, "--save"),
        blocking_s=blocking_s,
        restore_s=parse_seconds(restore, "--restore"),
    )


def _node_bytes(asked: str | None, workload: Workload | None, gpus: int) -> int | None:
    """Return what a node saves: as asked, or its ranks together; None where neither is known."""
    if asked is not None:
        size_bytes = parse_size(asked, "--size")
        if size_bytes == 0:
            raise OptionError(f"--size {asked}: a node saves more than 0 bytes")
        return size_bytes
    if workload is None:
        return None
    return sum(workload.size_bytes(rank) for rank in range(min(gpus, workload.world_size)))


def _baseline(candidates: list[SavingMethod]) -> SavingMethod:
    """Return the candidate that savings are counted from: `buffered`, or else the slowest save."""
    found = [one for one in candidates if one.name.split()[0] == "buffered"]
    return max(found or candidates, key=lambda one: one.costs.blocking_s)


def _above_zero(text: str | None, option: str) -> float | None:
    seconds = None if text is None else parse_seconds(text, option)
    if seconds == 0:
        raise OptionError(f"{option} must be above zero seconds, and is {text}")
    return seconds


_MOST = 64


def node_counts(text: str) -> list[int]:
    """Return the node counts in `text`, ascending: `2048`, `64,512`, `1024-131072` (doubling)."""
    counts: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", part)
        if not match or part.lstrip().startswith("0"):  # 2,048 is a mistake, not a list of 2 and 48
            raise OptionError(
                f"--nodes {text}: write 2048, 64,512,2048 or 1024-131072, from 1 up and without "
                "thousands separators"
            )
        low, high = int(match[1]), int(match[2] or match[1])
        if low > high:
            raise OptionError(f"--nodes {part.strip()}: the smaller number comes first")
        while low < high:
            counts.add(low)
            low *= 2
        counts.add(high)
    if len(counts) > _MOST:
        raise OptionError(f"--nodes names {len(counts)} sizes; {_MOST} are the most")
    return sorted(counts)
