"""`iobench tiers plan`: simulate the saves of a job to tiers before they are bought."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from iobench.cli.given import (
    FormatOption,
    ListingFormat,
    WorkloadArgument,
    WorkloadOption,
    check_effect,
    the_workload,
)
from iobench.errors import OptionError
from iobench.report.render import write_json
from iobench.units import (
    parse_seconds,
    parse_size,
)

if TYPE_CHECKING:
    from iobench.tiers.placement import Placement
    from iobench.tiers.plan import PlannedMemory, RateChange

_MEMORY_RATE = "10GiB/s"
_OF_REMOTE = (
    "on_lag", "max_lag", "max_lag_size", "placement", "keep_last", "remote_latency", "timeout",
    "in_flight", "read_back",
)  # fmt: skip


def plan(
    ctx: typer.Context,
    workload: WorkloadArgument = None,
    workload_option: WorkloadOption = None,
    memory: Annotated[
        str,
        typer.Option(
            "--memory",
            help="Memory for snapshots, and the rate of a copy into it: 8GiB@10GiB/s; without a "
            f"rate {_MEMORY_RATE}.",
        ),
    ] = "16GiB",
    slow_memory: Annotated[
        str | None,
        typer.Option(
            "--slow-memory", help="A larger, slower memory for the overflow: 32GiB@6GiB/s."
        ),
    ] = None,
    *,
    local: Annotated[str, typer.Option("--local", help="Rate of local storage: 2GiB/s.")],
    remote: Annotated[
        str | None,
        typer.Option(
            "--remote",
            help="Rate of the remote tier: 500MiB/s. With later rates: "
            "500MiB/s,100MiB/s@10min,0@1h is slower after 10 minutes, and down after an hour.",
        ),
    ] = None,
    placement: Annotated[
        str | None,
        typer.Option(
            "--placement",
            help="Choose the tier of each save by measured rates: durable, bandwidth or capacity.",
            show_default="all go to local storage",
        ),
    ] = None,
    every: Annotated[str, typer.Option("--every", help="Training time between two saves: 2min.")],
    saves: Annotated[int, typer.Option("--saves", min=2, max=10_000, help="How many saves.")] = 100,
    size: Annotated[
        str | None,
        typer.Option(
            "--size", help="Bytes of a checkpoint.", show_default="those of the first rank"
        ),
    ] = None,
    every_save: Annotated[
        bool,
        typer.Option(
            "--every-save", help="Every snapshot is written and copied, the oldest one first."
        ),
    ] = False,
    on_full: Annotated[
        str, typer.Option("--on-full", help="When memory is full: wait, skip or supersede.")
    ] = "wait",
    on_lag: Annotated[
        str | None,
        typer.Option(
            "--on-lag",
            help="When the remote tier is too far behind: wait, skip or supersede.",
            show_default="supersede; wait with --every-save",
        ),
    ] = None,
    max_lag: Annotated[str, typer.Option("--max-lag", help="How long a copy may wait.")] = "1h",
    max_lag_size: Annotated[
        str | None,
        typer.Option("--max-lag-size", help="Bytes that may wait for copies (500GiB)."),
    ] = None,
    keep_last: Annotated[
        int | None,
        typer.Option(
            "--keep-last",
            min=1,
            help="How many checkpoints the remote tier keeps. No others are copied, except with "
            "--every-save.",
            show_default="all",
        ),
    ] = None,
    local_latency: Annotated[
        str, typer.Option("--local-latency", help="What each local save takes longer: 20ms.")
    ] = "0s",
    remote_latency: Annotated[
        str,
        typer.Option(
            "--remote-latency", help="What each remote save, copy or read-back takes longer: 200ms."
        ),
    ] = "0s",
    in_flight: Annotated[
        str,
        typer.Option(
            "--in-flight",
            help="Bytes of a copy that are under way when a save begins, and go on: 40MiB.",
        ),
    ] = "0",
    read_back: Annotated[
        str | None,
        typer.Option(
            "--read-back",
            help="Rate at which copies are read back: 2GiB/s.",
            show_default="that of --remote",
        ),
    ] = None,
    timeout: Annotated[
        str,
        typer.Option("--timeout", help="A request to a remote tier that is down fails after this."),
    ] = "60s",
    step: Annotated[
        str | None,
        typer.Option(
            "--step",
            help="Time of a training step: losses are shown in steps too.",
            show_default="the published one of the workload",
        ),
    ] = None,
    format_: FormatOption = ListingFormat.TABLE,
) -> None:
    """Simulate saves to memory, local storage and a remote tier.

    It computes how long training stalls, when memory is full, how far each tier is behind, and how
    much training a failure loses. Rates are those that the tiers reach with a checkpoint.
    """
    from iobench import workloads
    from iobench.cli.tiers_plan_shown import document, lines
    from iobench.tiers.plan import TiersPlan
    from iobench.tiers.remote import Remote
    from iobench.tiers.simulation import simulate

    if remote is None:
        check_effect(ctx, _OF_REMOTE, "there is no --remote")
    full = workloads.load(the_workload(workload, workload_option))
    size_bytes = full.size_bytes() if size is None else parse_size(size, "--size")
    checked = Remote(
        ".", on_lag=_choice("--on-lag", on_lag), max_lag=parse_seconds(max_lag, "--max-lag"),
        max_lag_size=max_lag_size, every_save=every_save,
    )  # fmt: skip
    every_s = parse_seconds(every, "--every")
    if not every_s > 0 or not size_bytes:
        raise OptionError(f"--every {every}, --size {size}: both must be above 0")
    step_s = _step_s(step, full)
    memories = [_memory("memory", "--memory", memory, _MEMORY_RATE)]
    rates = [] if remote is None else _rates("--remote", remote)
    if slow_memory is not None:
        memories.append(_memory("slow memory", "--slow-memory", slow_memory, ""))
    found = simulate(
        TiersPlan(
            size_bytes=size_bytes,
            every_s=every_s,
            saves=saves,
            memories=tuple(memories),
            local_rate=_rate("--local", local),
            remote_rate=rates[0].rate_bytes_per_s if rates else None,
            remote_changes=tuple(rates[1:]),
            local_latency_s=_latency_s("--local-latency", local_latency),
            remote_latency_s=_latency_s("--remote-latency", remote_latency),
            in_flight_bytes=parse_size(in_flight, "--in-flight"),
            read_back_rate=None if read_back is None else _rate("--read-back", read_back),
            timeout_s=_latency_s("--timeout", timeout),
            placement=_placement(placement),
            keep_last=keep_last,
            on_full=_choice("--on-full", on_full) or "wait",
            every_save=every_save,
            on_lag=checked.past_lag,
            max_lag_s=checked.lag_limit.age_s,
            max_lag_bytes=checked.lag_limit.size_bytes,
        )
    )
    if format_ is ListingFormat.JSON:
        write_json(document(found, full.name, step_s), sys.stdout)
        return
    for name, text in lines(found, full.name, step_s):
        print(f"{name:<12}  {text}")


def _choice(option: str, text: str | None) -> Any:
    if text not in (None, "wait", "skip", "supersede"):
        raise OptionError(f"{option} {text}: wait, skip or supersede")
    return text


def _placement(text: str | None) -> Placement | None:
    from iobench.tiers.placement import Placement, PlacementGoal

    goals: tuple[PlacementGoal, ...] = get_args(PlacementGoal)
    goal = next((one for one in goals if one == text), None)
    if goal is None and text is not None:
        raise OptionError(f"--placement {text}: one of {', '.join(goals)}")
    return None if goal is None else Placement(goal=goal)


def _rate(option: str, text: str) -> int:
    rate = parse_size(text.removesuffix("/s"), option)
    if not rate:
        raise OptionError(f"{option} {text}: must be above 0")
    return rate


def _rates(option: str, text: str) -> list[RateChange]:
    """Return the rates of `500MiB/s,100MiB/s@10min,0@1h`, each since a moment."""
    from iobench.tiers.plan import RateChange

    found: list[RateChange] = []
    for part in text.split(","):
        rate, at, since = part.strip().partition("@")
        since_s = parse_seconds(since, option) if at else 0.0
        if bool(at) != bool(found) or (found and since_s <= found[-1].at_s):
            raise OptionError(
                f"{option} {text}: one rate, then others with times that grow, such as "
                "500MiB/s,100MiB/s@10min"
            )
        down = found and rate == "0"
        found.append(RateChange(at_s=since_s, rate_bytes_per_s=0 if down else _rate(option, rate)))
    return found


def _latency_s(option: str, text: str) -> float:
    found = parse_seconds(text, option)
    if found < 0 or (option == "--timeout" and not found):
        raise OptionError(f"{option} {text}: too short")
    return found


def _memory(name: str, option: str, text: str, rate: str) -> PlannedMemory:
    from iobench.tiers.plan import PlannedMemory

    size, at, own = text.partition("@")
    if not at and not rate:
        raise OptionError(f"{option} {text}: give the rate of a copy too, {text}@6GiB/s")
    return PlannedMemory(
        name=name,
        size_bytes=parse_size(size, option),
        rate_bytes_per_s=_rate(option, own if at else rate),
    )


def _step_s(step: str | None, workload: Any) -> float | None:
    if step is not None:
        return parse_seconds(step, "--step")
    return workload.step_time.seconds if workload.step_time else None
