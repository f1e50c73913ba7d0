"""Planning: from what a user asked to a plan, its size chosen to fit the disk and the time."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from iobench import workloads
from iobench.bench.plan import (
    DEFAULT_SECONDS,
    Plan,
    measure_rates,
)
from iobench.bench.target import Location, Target, target_of
from iobench.errors import TargetError, UsageError
from iobench.units import MIB, format_rate, format_seconds, format_size, parse_size
from iobench.workloads import Workload
from iobench.writers import registry
from iobench.writers.base import Writer

__all__ = ["make_plan", "plan_lines"]

_FULL = "full"
_LEAST_POOL = 16 * MIB


def make_plan(
    *,
    workload: str,
    writers: str,
    target: Location,
    size: str | None = None,
    repeat: int = 5,
    rank: int = 0,
    pool: str = "1GiB",
    ceiling: bool = True,
    crc: bool = True,
    seed: int | None = None,
) -> Plan:
    """A plan that was checked: names known, writers available, target writable and large enough.

    Without `size` the workload is scaled to what fits in the target and in about two minutes, by
    short probes of each writer. Raises UsageError and its kin, UnavailableError.
    """
    full = workloads.load(workload)
    if not full.files(rank):
        raise UsageError(f"workload {full.name!r}: rank {rank} writes no files; choose another")
    full_bytes = full.size_bytes(rank)
    chosen = tuple(registry.parse_specs(writers))
    pool_bytes = max(parse_size(pool), _LEAST_POOL)
    place = target_of(target, chosen)
    place.check()
    for writer in chosen:
        writer.require(target)
    scaled = _scaled(full, rank, full_bytes, size, chosen, place, repeat, ceiling)
    plan = Plan(
        workload=scaled,
        full_bytes=full_bytes,
        rank=rank,
        writers=chosen,
        target=place,
        repeat=repeat,
        pool_bytes=pool_bytes,
        ceiling=ceiling,
        crc=crc,
        seed=secrets.randbits(32) if seed is None else seed,
    )
    plan.check()
    return plan


def _scaled(
    full: Workload,
    rank: int,
    full_bytes: int,
    size: str | None,
    writers: tuple[Writer, ...],
    target: Target,
    repeat: int,
    ceiling: bool,
) -> Workload:
    if size == _FULL:
        return full
    if size is not None:
        return full.scaled(parse_size(size), rank)
    free = target.free_bytes()
    if free == 0:
        raise TargetError(f"--target {target.location}: no space is left for a checkpoint")
    rates = measure_rates(writers, target)
    ceiling = ceiling and not target.no_ceiling
    affordable = int(DEFAULT_SECONDS / rates.run_s_per_byte(repeat=repeat, ceiling=ceiling))
    return full.scaled(min(affordable, full_bytes, *([] if free is None else [free])), rank)


def plan_lines(plan: Plan) -> Iterator[str]:
    """The plan in words, before anything is measured."""
    workload, size = plan.workload, plan.size_bytes
    files = workload.files(plan.rank)
    yield (
        f"workload  {workload.name}, rank {plan.rank} of {workload.world_size}: "
        f"{len(files)} files, {format_size(size)} ({size / 1e9:.2f} GB)"
    )
    if workload.scale:
        yield (
            f"scaled    {workload.scale.text}: {size / plan.full_bytes:.2%} of "
            f"{format_size(plan.full_bytes)} (--size full for all of it)"
        )
    large = sorted(files, key=lambda file: -file.size_bytes)[:3]
    shown = ", ".join(f"{f.path} {format_size(f.size_bytes)} ({f.format})" for f in large)
    yield f"files     {shown}{', ...' if len(files) > len(large) else ''}"
    yield f"writers   {', '.join(_label(writer) for writer in plan.writers)}"
    free = plan.target.free_bytes()
    usable = "" if free is None else f", {format_size(free)} usable"
    yield f"target    {plan.target.location}{usable}"
    jobs = "beside fio" if plan.measures_ceiling else "no ceiling"
    if plan.ceiling and plan.target.no_ceiling:
        jobs += f" ({plan.target.no_ceiling})"
    elif plan.ceiling and not plan.measures_ceiling:
        jobs += " (fio is not installed: apt-get install fio)"
    yield (
        f"run       {plan.repeat} repetitions, {jobs}, "
        f"{format_size(plan.written_bytes)} written in all, "
        f"at most {format_size(plan.pool_bytes)} of memory for data"
    )


def expected_line(plan: Plan) -> str:
    """How long the plan will take, by short probes of its writers."""
    rates = measure_rates(plan.writers, plan.target)
    per_byte = rates.run_s_per_byte(repeat=plan.repeat, ceiling=plan.measures_ceiling)
    return (
        f"expected  about {format_seconds(per_byte * plan.size_bytes)}, "
        f"probed at {format_rate(max(rates.save))}"
    )


def _label(writer: Writer) -> str:
    defaults = type(writer.options)().to_dict()
    infos = {info.name: info for info in writer.options.describe()}
    changed = [
        f"{name}={infos[name].show(value)}"
        for name, value in writer.options.to_dict().items()
        if value != defaults[name]
    ]
    return ",".join([writer.name, *changed])
