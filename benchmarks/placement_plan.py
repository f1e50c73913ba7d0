"""What `iobench tiers plan` says of a live run with placement, next to what was measured."""

from __future__ import annotations

import statistics

import record
from placement_runs import Run, shown

from iobench.tiers.observed import LOCAL, REMOTE
from iobench.tiers.placement import Placement
from iobench.tiers.plan import PlannedMemory, Prediction, RateChange, TiersPlan
from iobench.tiers.simulation import simulate

__all__ = ["ANSWER_S", "ATTEMPTS", "COPIES_PER_S", "KEPT", "SLOTS", "compare", "predicted"]

_MOST_OFF = 0.10
ATTEMPTS, ANSWER_S = 2, 1.0
KEPT = 2
SLOTS, COPIES_PER_S = 2, 32
_READS_PER_S = 10
"""The link is limited towards the server only."""


def predicted(
    run: Run,
    chosen: Placement,
    fixed: dict[str, float],
    size: int,
    local_rate: int,
    every_s: float,
) -> Prediction:
    """Return what `iobench tiers plan` says of a run with the goal "durable"."""
    copy_s = 1 / COPIES_PER_S
    begin_s, (_, rate) = run.saves[0].began_s - every_s, run.rates[0]
    return simulate(
        TiersPlan(
            size_bytes=size,
            every_s=every_s,
            saves=len(run.saves),
            memories=(
                PlannedMemory(
                    name="memory", size_bytes=SLOTS * size, rate_bytes_per_s=COPIES_PER_S * size
                ),
            ),
            local_rate=local_rate,
            local_latency_s=max(0.0, fixed[LOCAL] - copy_s),
            remote_rate=round(rate),
            remote_latency_s=max(0.0, fixed[REMOTE] - copy_s),
            in_flight_bytes=size,  # all parts of an upload of this size are sent at once
            read_back_rate=_READS_PER_S * size,
            remote_changes=tuple(
                RateChange(at_s=at_s - begin_s, rate_bytes_per_s=round(rate))
                for at_s, rate in run.rates[1:]
            ),
            timeout_s=ATTEMPTS * ANSWER_S,
            placement=chosen,
            keep_last=KEPT,
        )
    )


def compare(name: str, run: Run, found: Prediction, samples: record.Record) -> None:
    """Print and record what was predicted of a run, next to what was measured."""
    there = [one.remote_s for one in run.saves if one.remote_s is not None]
    end_s = max(one.durable_s or 0.0 for one in found.saves)  # then the run ended, with its copies
    expected = [
        one.remote_s - one.at_s
        for one in found.saves
        if one.remote_s is not None and one.remote_s <= end_s
    ]
    rows = {
        "stall, sum": (sum(one.stall_s for one in run.saves), sum(found.stalls_s)),
        "durable": (
            statistics.mean(one.elapsed_s for one in run.saves),
            statistics.mean(found.lags_s),
        ),
        "durable remotely": (statistics.mean(there), statistics.mean(expected)),
    }
    for turn, (what, (measured_s, predicted_s)) in enumerate(rows.items()):
        off = predicted_s / measured_s - 1
        verdict = "ok" if abs(off) <= _MOST_OFF else "MISS"
        print(
            f"{verdict:4} plan      {what:17} {measured_s:8.3f} s live, {predicted_s:8.3f} s "
            f"({off:+.1%})"
        )
        samples.sample(f"{name}, plan, {what}", turn, measured_s, predicted_s=predicted_s)
    print(
        f"     plan      {len(there)} saves were in the remote tier, predicted {len(expected)}   "
        f"{shown([one.tier for one in found.saves])}"
    )
