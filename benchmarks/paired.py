"""Two checkouts in the same rounds: a row of a table with their ratio and its interval."""

from __future__ import annotations

from collections.abc import Sequence

from iobench.bench.judging.stats import paired_log_ratio

HEADING = "| what | first | second | second / first, 95% interval | |\n|---|---:|---:|---|---|"


def row(name: str, seconds: tuple[list[float], list[float]], figures: Sequence[str]) -> str:
    """Return the row of an arm; `figures` show the times of the first and the second checkout.

    The ratio is that of the rates: above 1 the second checkout is faster.
    """
    first, second = seconds
    ratio = paired_log_ratio(first, second)
    if ratio.interval is None or len(first) < 6:  # of fewer, no interval reaches 95%
        says = f"undecided: {len(first)} rounds, 6 needed"
    elif 1.0 in ratio.interval:
        says = "no difference shown"
    else:
        says = "faster" if ratio.ratio > 1 else "SLOWER"
    bounds = f"{ratio.interval.low:.3f} to {ratio.interval.high:.3f}" if ratio.interval else "-"
    return f"| {name} | {figures[0]} | {figures[1]} | {ratio.ratio:.3f} ({bounds}) | {says} |"
