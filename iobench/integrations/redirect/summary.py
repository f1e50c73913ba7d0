"""The summary that `iobench exec` prints on stderr after the script has ended."""

from __future__ import annotations

from collections.abc import Iterator

from iobench.integrations.redirect.call_counts import Count
from iobench.integrations.redirect.launch import ExecOutcome
from iobench.units import MIB, format_rate, format_size
from iobench.writers.base import Writer

__all__ = ["summary"]

_WORTH_A_RATE = 8 * MIB  # a rate of fewer bytes measures latency


def summary(outcome: ExecOutcome, writer: Writer) -> Iterator[str]:
    """Yield lines: calls of the writer, calls of stock with the reason, and failed calls."""
    options = ",".join(writer.options.changed())
    name = f"{writer.name},{options}" if options else writer.name
    if not outcome.functions:
        yield f"nothing was redirected to {name}: {_why_nothing(outcome)}"
    else:
        yield f"redirected to {name}, in {_number(outcome.processes, 'process', 'processes')}:"
    width = max((len(function) for function in outcome.functions), default=0)
    for function, entry in outcome.functions.items():
        if entry.redirected.calls:
            yield f"  {function:{width}}  {_moved(entry.redirected)}"
        for text, times in entry.fallbacks.items():
            yield f"  {function:{width}}  {_number(times, 'call')} fell back: {text}"
        for reason, count in entry.stock.items():
            example = f" ({count.example})" if count.example else ""
            yield f"  {function:{width}}  {_plain(count)} by the stock function: {reason}{example}"
        if entry.failed.calls:
            yield f"  {function:{width}}  {_plain(entry.failed)} FAILED ({entry.failed.example})"
    yield from outcome.problems


def _why_nothing(outcome: ExecOutcome) -> str:
    if outcome.processes:
        return "the script saved and loaded nothing"
    return "no Python process with iobench loaded torch or safetensors"


def _moved(count: Count) -> str:
    moved = f"{_plain(count)}, {format_size(count.bytes)}"
    if count.bytes < _WORTH_A_RATE or not count.seconds:
        return moved
    return f"{moved}, {format_rate(count.bytes / count.seconds)}"


def _plain(count: Count) -> str:
    return f"{_number(count.calls, 'call')}, {count.seconds:.3f} s"


def _number(count: int, one: str, many: str = "") -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"
