"""Durations of one column in one form, so that a reader can compare them by their digits."""

from __future__ import annotations

from collections.abc import Callable, Iterable

__all__ = ["DurationForm", "duration_form"]

DurationForm = Callable[[float], str]
"""Seconds to text."""

_UNITS = (("ms", 1e-3, 1.0), ("s", 1.0, 120.0), ("min", 60.0, 7200.0), ("h", 3600.0, float("inf")))
"""Name, seconds, and the shortest duration for which the next unit is used."""
_MOST_UNITS = 10_000
_DIGITS = 3  # significant ones, of the shortest duration


def duration_form(seconds: Iterable[float]) -> DurationForm:
    """How to write all of `seconds`: in one unit, with equally many decimals.

    The shortest decides, unless the longest would then have more than four digits before the point.
    """
    values = sorted(abs(value) for value in seconds if value)
    low, high = (values[0], values[-1]) if values else (1.0, 1.0)
    name, factor = (
        next((unit, size) for unit, size, end in _UNITS if low < end and high < _MOST_UNITS * size)
        if high < _MOST_UNITS * _UNITS[-1][1]
        else _UNITS[-1][:2]
    )
    whole = len(str(int(low / factor))) if low >= factor else 0
    decimals = max(0, min(_DIGITS - whole, 2))
    return lambda value: f"{value / factor:,.{decimals}f} {name}"
