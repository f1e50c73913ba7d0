"""What `iobench tiers plan` prints of a prediction."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from iobench.units import count_of, format_rate, format_seconds, format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from iobench.tiers.placement import Placement
    from iobench.tiers.plan import Prediction, RateChange, TiersPlan

__all__ = ["document", "lines"]


def lines(found: Prediction, workload: str, step_s: float | None) -> list[tuple[str, str]]:
    """Return the names and texts of the lines of a table."""
    plan = found.plan
    shown = [
        (
            "workload",
            f"{workload}: {count_of(plan.saves, 'save')} of {format_size(plan.size_bytes)}, one "
            f"every {format_seconds(plan.every_s)} of training",
        )
    ]
    for number, memory in enumerate(plan.memories):
        rate = format_rate(memory.rate_bytes_per_s)
        used = "not used"
        if (first := found.first_use(number)) is not None:
            used = f"used from save {first} on"
        shown.append((memory.name, f"{format_size(memory.size_bytes)} at {rate}, {used}"))
    shown.append(("", _full(found)))
    shown.append(("stall", _stall(found)))
    if plan.placement is not None:
        shown += zip(("placement", ""), _placed(found, plan.placement), strict=True)
    shown.append(("local", _behind(found.lags_local_s, plan.local_rate, plan)))
    if plan.remote_rate is not None:
        shown.append(("remote", _behind(found.lags_remote_s, plan.remote_rate, plan)))
        if plan.remote_changes:
            shown.append(("", _changes(plan.remote_changes)))
    shown.append(("at most lost", f"{_lost(found.lost_node_s, step_s)} if the node fails"))
    if found.lost_local_s is not None:
        shown.append(("", f"{_lost(found.lost_local_s, step_s)} if the local tier fails"))
    return shown


def _full(found: Prediction) -> str:
    plan = found.plan
    if plan.synchronous:
        return "a snapshot does not fit into the memory: every save is synchronous"
    first = found.first_full()
    if first is None:
        return "never full"
    return f"full at save {first}, after {format_seconds(found.saves[first - 1].at_s)}"


def _stall(found: Prediction) -> str:
    stalls, first = found.stalls_s, found.first_full()
    after = stalls if first is None else stalls[first - 1 :]
    middle = format_seconds(statistics.median(after))
    text = f"{middle} a save" if first in (None, 1) else (
        f"{format_seconds(statistics.median(stalls[: first - 1]))} a save, {middle} from save "
        f"{first} on"
    )  # fmt: skip
    part = 100 * sum(stalls) / (sum(stalls) + found.plan.every_s * len(stalls))
    dropped = [one.end for one in found.saves if one.end != "durable"]
    more = f"; {len(dropped)} saves {dropped[0]}" if dropped else ""
    return f"{text}, at most {format_seconds(max(stalls))}; {part:.2g}% of the time{more}"


def _placed(found: Prediction, placement: Placement) -> tuple[str, str]:
    tiers = [one.tier for one in found.saves if one.tier]
    switches = sum(one != other for one, other in itertools.pairwise(tiers))
    lags = found.lags_s
    return (
        f"goal {placement.goal}: {count_of(tiers.count('remote'), 'save')} to the remote tier, "
        f"{tiers.count('local')} to local storage, the tier changes {switches} times",
        f"durable {format_seconds(statistics.median(lags))} after the begin of a save, at most "
        f"{format_seconds(max(lags))}",
    )


def _changes(changes: Sequence[RateChange]) -> str:
    shown = [
        f"{format_rate(one.rate_bytes_per_s) if one.rate_bytes_per_s else 'down'} from "
        f"{format_seconds(one.at_s)} on"
        for one in changes
    ]
    return ", ".join(shown)


def _behind(lags: list[float], rate: int, plan: TiersPlan) -> str:
    if not lags:
        return f"{format_rate(rate)}: no save is durable there"
    left = plan.saves - len(lags)
    more = f", {left} of {plan.saves} saves never" if left else ""
    return (
        f"{format_rate(rate)}: durable {format_seconds(statistics.median(lags))} after the begin "
        f"of a save, at most {format_seconds(max(lags))}{more}"
    )


def _lost(seconds: float, step_s: float | None) -> str:
    text = f"{format_seconds(seconds)} of training"
    return text if step_s is None else f"{text}, {count_of(math.ceil(seconds / step_s), 'step')}"


def document(found: Prediction, workload: str, step_s: float | None) -> dict[str, Any]:
    """Return the JSON document."""
    plan = asdict(found.plan)
    saves = [{**asdict(one), "stall_s": one.stall_s} for one in found.saves]
    return {
        "schema": "iobench.tiers-plan/1",
        "workload": workload,
        "plan": plan,
        "synchronous": found.plan.synchronous,
        "first_full": found.first_full(),
        "median_stall_s": statistics.median(found.stalls_s),
        "stalled_s": sum(found.stalls_s),
        "lost_node_s": found.lost_node_s,
        "lost_local_s": found.lost_local_s,
        "step_s": step_s,
        "ended_s": found.ended_s,
        "saves": saves,
    }
