"""Planning: makes a plan from a user's options, with a size that fits the disk and the time."""

from __future__ import annotations

import heapq
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from iobench.bench.axes import Axes
from iobench.bench.choose import choose, find_baseline, on_equal_terms, targets_of
from iobench.bench.contenders.base import Contender
from iobench.bench.data.replay import Replay
from iobench.bench.fio import JOBS
from iobench.bench.judging.repeat import Repeat
from iobench.bench.judging.rules import NO_CLAIM, Rules
from iobench.bench.plan import (
    DEFAULT_SECONDS,
    RESERVE,
    Plan,
    first_of_each_target,
)
from iobench.bench.targets.base import Location, Target
from iobench.errors import TargetError, UsageError
from iobench.results.records import WorldFacts
from iobench.units import GIB, MIB, format_rate, format_seconds, format_size, parse_size
from iobench.verification.imported import is_path, load_workload
from iobench.workloads import FileSpec, TensorSpec, Workload
from iobench.writers.s3_store.target import is_s3
from iobench.writers.transfer import Transfer

_PROBE_BYTES, _REMOTE_PROBE_BYTES = 256 * MIB, 32 * MIB
_REST_S = 0.25  # before each sample: settle, removing files, starting fio
_OWN_S_PER_BYTE = 0.3 / GIB  # untimed work: renewing the pool, digests, verification


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a repetition of a run takes, by short probes.

    `steps` are its saves, restores and fio jobs, and `s_per_byte` their seconds per byte of one
    process's checkpoint, with untimed work. `saved` is how often such a byte is saved.
    """

    steps: int
    s_per_byte: float
    saved: int
    save_bytes_per_s: float
    """The highest rate of a save."""

    def run_s(self, size_bytes: int, repeat: int) -> float:
        """Return the seconds of a run with checkpoints of `size_bytes`, with its rests."""
        return repeat * (size_bytes * self.s_per_byte + self.steps * _REST_S)

    def affordable_bytes(self, seconds: float, repeat: int) -> int:
        """Return the size for which `run_s` is about `seconds`.

        Rests count for at most half of `seconds`: there is always time left to move bytes.
        """
        moving = max(seconds - self.run_s(0, repeat), seconds / 2)
        return int(moving / (repeat * self.s_per_byte))


def measure_rates(plan: Plan) -> Rates:
    """Save and restore a short random file with each contender in each of its targets, once.

    For planning only. Assumes that fio's jobs are as fast as the fastest contender, that a process
    in the background takes half of the rate, that several processes together reach the rate of one
    process, and that files of every shape reach the rate of this file.

    The contenders are copies: the blocks that a writer keeps count as memory of its first save.
    """
    variants, restores = plan.variants_with_twins, plan.axes.restores
    copies, _ = choose(",".join(one.label for one in plan.contenders))
    copy_of = dict(zip(plan.contenders, copies, strict=True))
    steps, s_per_byte, fastest = 0, 0.0, 0.0
    for value, target in plan.by_location.items():
        here = [one for one in variants if one.target == value]
        contenders = list(dict.fromkeys(one.contender for one in here))
        rates = _probe([copy_of[one] for one in contenders], target)
        probed = dict(zip(contenders, rates, strict=True))
        for one in here:
            save, restore = (rate / (2 if one.background else 1) for rate in probed[one.contender])
            restored = one.numjobs * sum(1 / (tp or 1) for tp in restores)
            s_per_byte += one.saves * (1 / save + _OWN_S_PER_BYTE) + restored / restore
            steps, fastest = steps + 1 + len(restores), max(fastest, save)
        if value in plan.ceiling_targets:
            best = map(max, zip(*probed.values(), strict=True))
            s_per_byte += len(JOBS) * sum(1 / rate for rate in best)
            steps += 2 * len(JOBS)
    return Rates(
        steps=steps,
        s_per_byte=s_per_byte,
        saved=sum(one.saves for one in variants),
        save_bytes_per_s=fastest,
    )


def _probe(contenders: Sequence[Contender], target: Target) -> list[tuple[float, float]]:
    found = []
    free = target.free_bytes()
    size = _REMOTE_PROBE_BYTES if free is None else min(_PROBE_BYTES, free)
    size = size or _PROBE_BYTES  # no free space: no contender stores anything
    blob = TensorSpec(name="blob", dtype="uint8", shape=(size,))
    file = FileSpec(path="file", format="raw", tensors=(blob,), size_bytes=size, exact=True)
    with target.scratch() as scratch:
        for one in contenders:
            replay, where = Replay([file], pool_bytes=size, seed=0), scratch.locate("probe")
            assert replay.size_bytes() == size
            replay.prepare()
            found.append((_rate(one.save, replay, where), _rate(one.restore, replay, where)))
            scratch.remove("probe")
    return found


def _rate(
    operation: Callable[[Replay, Location], Transfer], replay: Replay, where: Location
) -> float:
    began = time.perf_counter()
    operation(replay, where)
    return replay.size_bytes() / (time.perf_counter() - began)


_FULL = "full"


def make_plan(
    *,
    workload: str,
    writers: str,
    target: Location | tuple[Location, ...],
    size: str | None = None,
    repeat: int | Repeat = 5,
    aa: bool = False,
    rank: int = 0,
    ceiling: bool = True,
    seed: int | None = None,
    baseline: str | None = None,
    axes: Axes | None = None,
    rules: Rules | None = None,
    world: WorldFacts | None = None,
) -> Plan:
    """Return a checked plan: names known, writers available, targets writable and large enough.

    `target` is one location, or several that are compared. A writer takes part where it works.
    Without `size` the workload is scaled to fit in the target and in about 90 seconds. Short
    probes of each writer give the rates for that. With a `world`, the ranks of a launcher take
    part, each with the files of its rank. `rules` set the number of repetitions, and the size to
    all of the workload unless one is given; fio does not run between. Raises UsageError, its
    subclasses, and UnavailableError.
    """
    if rules is not None:
        size, repeat, ceiling = size or _FULL, rules.times, False
    full = load_workload(workload)
    full_bytes = full.size_bytes(rank)
    if not full_bytes:
        raise UsageError(f"workload {full.name!r}: rank {rank} writes no files; choose another")
    axes = axes or Axes()
    if world is not None:
        axes = replace(axes, numjobs=(world.size,))
    axes.check_writers(axes.most_jobs if world is None else world.local)
    locations = target if isinstance(target, tuple) else (target,)
    several = len(locations) > 1
    often = Repeat(times=repeat) if isinstance(repeat, int) else repeat
    asked, left_out = choose(writers, *locations)
    if often.is_sustained:
        left_out += [f"{one.label}: only restores" for one in asked if not one.saves]
        asked = [one for one in asked if one.saves]
    chosen = on_equal_terms(one for one in asked if axes.takes(one))
    if not chosen:
        raise _nothing([*left_out, *axes.skipped(asked)])
    targets, absent = targets_of(locations, chosen)
    if several:
        axes = replace(axes, targets=tuple(one.location for one in targets), absent=absent)
    plan = Plan(
        workload=full,
        full_bytes=full_bytes,
        rank=rank,
        contenders=tuple(chosen),
        left_out=(*left_out, *axes.skipped(asked)),
        axes=axes,
        targets=targets,
        repeat=often,
        aa=aa,
        ceiling=ceiling and not often.is_sustained,
        seed=secrets.randbits(32) if seed is None else seed,
        given=os.path.abspath(workload) if is_path(workload) and not is_s3(workload) else workload,
        rules=rules,
        world=world,
    )
    if not plan.variants:
        raise _nothing(plan.left_out)
    alike = several or axes.with_and_without
    plan = replace(
        plan,
        baseline=find_baseline(baseline, plan.variants, alike=alike),
        workload=_scaled(plan, size),
    )
    plan.check()
    bounded = often.writing(plan.repetition_bytes, plan.earlier_bytes)
    return plan if bounded is often else replace(plan, repeat=bounded)


def _nothing(reasons: Sequence[str]) -> UsageError:
    return UsageError(f"nothing to measure: {'; '.join(reasons)}")


def _scaled(plan: Plan, size: str | None) -> Workload:
    full, often, axes = plan.workload, plan.repeat, plan.axes
    if size == _FULL:
        return full
    if size is not None:
        return full.scaled(parse_size(size, "--size"), plan.rank)
    storing = {one.target for one in plan.variants if one.contender.stores}
    fits = []
    for target in (one for value, one in plan.by_location.items() if value in storing):
        free = target.free_bytes()
        if free == 0:
            raise TargetError(
                f"--target {target.location}: no space is left for a checkpoint ({RESERVE}); "
                "make room"
            )
        fits += [] if free is None else [free // (often.stored * axes.saves + axes.earlier)]
    rates = measure_rates(plan)
    seconds = (often.is_sustained and often.max_s) or DEFAULT_SECONDS
    if often.max_bytes is not None:
        fits.append(int(often.max_bytes / (often.times * max(rates.saved, 1))))
    affordable = rates.affordable_bytes(seconds, often.times)
    return full.scaled(min(affordable, plan.full_bytes, *fits), plan.rank)


def plan_lines(plan: Plan) -> Iterator[str]:
    """Yield the lines that describe the plan, before anything is measured."""
    workload, size = plan.workload, plan.size_bytes
    files = plan.files
    yield (
        f"workload  {workload.name}, rank {plan.rank} of {workload.world_size}: "
        f"{len(files)} files, {format_size(size)} ({size / 1e9:.2f} GB)"
    )
    if workload.scale:
        yield (
            f"scaled    {workload.scale.text}: {size / plan.full_bytes:.2%} of "
            f"{format_size(plan.full_bytes)} (--size full for all of it)"
        )
    large = heapq.nlargest(3, files, key=attrgetter("size_bytes"))
    shown = ", ".join(f"{f.path} {format_size(f.size_bytes)} ({f.format})" for f in large)
    yield f"files     {shown}{', ...' if len(files) > len(large) else ''}"
    yield f"writers   {', '.join(one.label for one in plan.contenders)}"
    yield from _axis_lines(plan)
    for line in plan.left_out:
        yield f"left out  {line}"
    for target in plan.targets:
        free = target.free_bytes()
        usable = "" if free is None else f", {format_size(free)} usable"
        yield f"target    {target.location}{usable}"
    reasons = [one.no_ceiling for one in plan.targets if one.no_ceiling]
    jobs = "with fio" if plan.ceiling_targets else "without fio"
    if plan.ceiling and reasons:
        jobs += f" ({', '.join(dict.fromkeys(reasons))})"
    elif plan.ceiling and not plan.ceiling_targets:
        jobs += " (fio is not installed: apt-get install fio)"
    again = ", ".join(one.label for one in first_of_each_target(plan.variants))
    twice = f"{again} twice (A/A), " if plan.aa else ""
    unknown = plan.ceiling_targets if plan.repeat.precision is None else False
    most = " at most" if unknown or plan.repeat.most else ""
    yield (
        f"run       {plan.repeat}, {twice}{jobs}, "
        f"{format_size(plan.written_bytes)} written in all{most}, "
        f"at most {format_size(plan.pool_bytes)} of memory for data"
    )


def _axis_lines(plan: Plan) -> Iterator[str]:
    """Yield lines on the axes besides the writers, and on the ranks whose files are saved."""
    axes = plan.axes
    if len(plan.variants) > len(plan.contenders):
        yield f"variants  {', '.join(one.label for one in plan.variants)}"
    if plan.rules is not None:
        yield (
            f"rules     {plan.rules.title}: {plan.rules.times} saves, then {plan.rules.times} "
            f"restores of these checkpoints; {NO_CLAIM}"
        )
    if axes.earlier:
        yield (
            "background  another process restores an earlier checkpoint, cold, over and over: "
            f"{format_size(axes.earlier * plan.size_bytes)} more in each target"
        )
    if axes.restores != (None,):
        shown = [
            "all" if tp is None else f"what one of {tp} tensor parallel ranks loads"
            for tp in axes.restores
        ]
        yield f"restores  {', then '.join(shown)}"
    total = format_size(plan.all_bytes)
    if plan.world is not None:
        has, most = plan.workload.world_size, plan.world.size
        whose = f"the files of rank 0 to {min(most, has) - 1} of {has}, each its own"
        if axes.sliced:
            whose = "replicas of rank 0, which save its files once, and each restores them"
        elif axes.replicas:
            whose = "replicas of rank 0, each saves its files and restores those that rank 0 saved"
        elif most > has:
            whose += f"; from rank {has} on, copies of these"
        yield f"ranks     {most}: {whose}, {total} in all"
        if plan.part:
            yield f"scaled    {plan.part}: the others' files are not saved"
    elif axes.most_jobs > 1:
        first, last = plan.ranks[0], plan.ranks[-1]
        whose = f"ranks {first} to {last}" if last > first else f"a copy of rank {first} each"
        if axes.sliced:
            whose = f"replicas of rank {first}, which save its files once, and each restores them"
        numbers = ", ".join(map(str, axes.numjobs))
        yield f"processes {numbers} at once: {whose}, {total} in all at most"


def expected_line(plan: Plan) -> str:
    """Return a line with the expected duration, from short probes of the plan's writers."""
    often, rates = plan.repeat, measure_rates(plan)
    probed = f"probed at {format_rate(rates.save_bytes_per_s)}"
    if often.is_sustained and often.max_s is not None:
        once_s = rates.run_s(plan.size_bytes, 1)
        times = min(often.max_s / once_s, often.most or math.inf)
        return (
            f"expected  at most {format_seconds(times * once_s)}, about "
            f"{format_size(times * plan.repetition_bytes)} written, {probed}"
        )
    run_s = rates.run_s(plan.size_bytes, often.times)
    return f"expected  about {format_seconds(run_s)}, {probed}"
