"""`iobench plan --offload`: when optimizer state on SSDs pays."""

from __future__ import annotations

import re
import sys
from typing import Annotated

import typer

from iobench.cli.given import given
from iobench.cli.node_counts import node_counts
from iobench.errors import OptionError, UsageError
from iobench.report.render import DocumentFormat
from iobench.units import parse_seconds, parse_size

__all__ = [
    "OFFLOAD_ONLY",
    "OffloadBackwardOption",
    "OffloadOption",
    "OffloadParamsOption",
    "OffloadRateOption",
    "RatedWritesOption",
    "plan_offload",
]

OffloadOption = Annotated[
    bool,
    typer.Option("--offload", help="Plan optimizer state on SSDs instead (docs/offload.md)."),
]
OffloadParamsOption = Annotated[
    str | None, typer.Option("--params", help="With --offload: trained parameters (7B).")
]
OffloadRateOption = Annotated[
    str | None,
    typer.Option(
        "--rate", help="With --offload: what the SSDs of a node read and write, together (6GB/s)."
    ),
]
OffloadBackwardOption = Annotated[
    str | None,
    typer.Option(
        "--backward", help="With --offload: time of backward.", show_default="2/3 of --step"
    ),
]
RatedWritesOption = Annotated[
    str | None,
    typer.Option(
        "--rated-writes",
        help="With --offload: bytes that the SSDs of a node are rated to write (14016TB).",
    ),
]

OFFLOAD_ONLY = ("params", "rate", "backward", "rated_writes")
"""Options that only `--offload` has."""
_SHARED = ("offload", "workload", "workload_option", "nodes", "step", "format_")
_COUNT = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)([kmbt]?)", re.IGNORECASE)


def plan_offload(
    ctx: typer.Context,
    workload: str | None,
    *,
    params: str | None,
    rate: str | None,
    step: str | None,
    backward: str | None,
    rated_writes: str | None,
    nodes: str,
    form: DocumentFormat,
) -> None:
    """Print the plan. Raises UsageError for missing options, and for those without an effect."""
    without = [option for name, option in given(ctx) if name not in (*_SHARED, *OFFLOAD_ONLY)]
    if without:
        raise UsageError(f"{', '.join(without)}: no effect with --offload; leave it out")
    from iobench.goodput.offloading import BACKWARD_SHARE, Offloading
    from iobench.report.offloading import write

    if rate is None:
        raise UsageError("--offload needs --rate: bytes per second that the SSDs of a node move")
    rate_bytes_per_s = parse_size(rate.removesuffix("/s"), "--rate")
    if not rate_bytes_per_s:
        raise OptionError(f"--rate {rate}: above 0")
    title, parameters, step_s = _training(workload, params, step)
    backward_s = step_s * BACKWARD_SHARE
    if backward is not None:
        backward_s = parse_seconds(backward, "--backward")
    if not 0 < backward_s <= step_s:
        raise OptionError(f"--backward {backward}: above 0, and at most the step of {step_s:g} s")
    rated = None if rated_writes is None else parse_size(rated_writes, "--rated-writes")
    if rated == 0:
        raise OptionError(f"--rated-writes {rated_writes}: above 0")
    found = [
        Offloading(
            parameters=parameters,
            nodes=count,
            rate_bytes_per_s=rate_bytes_per_s,
            step_s=step_s,
            backward_s=backward_s,
            rated_bytes=rated,
        )
        for count in node_counts(nodes)
    ]
    write(title, found, form, sys.stdout)


def _training(workload: str | None, params: str | None, step: str | None) -> tuple[str, int, float]:
    """Return a title, the parameters, and the seconds of forward and backward."""
    from iobench import workloads

    if (workload is None) == (params is None):
        raise UsageError("--offload needs a workload, or --params: how many parameters are trained")
    found = None if workload is None else workloads.load(workload)
    parameters = found.parameters if found else _count(str(params))
    if step is not None:
        step_s = parse_seconds(step, "--step")
    elif found is not None and found.step_time is not None:
        step_s = found.step_time.seconds
    else:
        raise UsageError("--offload needs --step: the time of forward and backward")
    if step_s <= 0:
        raise OptionError(f"--step {step}: above 0")
    name = workload or "a model"
    return f"{name} with {parameters:,} parameters of 16 bits", parameters, step_s


def _count(text: str) -> int:
    match = _COUNT.fullmatch(text.strip())
    power = "kmbt".find(match[2].lower()) + 1 if match and match[2] else 0
    count = round(float(match[1]) * 1000**power) if match else 0
    if count < 1:
        raise OptionError(f"--params {text}: write 7000000000, 300M or 7B")
    return count
