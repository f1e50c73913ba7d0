"""One form for all durations of a column: the same unit and the same number of decimals."""

from __future__ import annotations

from collections.abc import Callable, Iterable

__all__ = ["DurationForm", "duration_form"]

DurationForm = Callable[[float], str]
"""Function from seconds to text."""

_UNITS = (("ms", 1e-3, 1.0), ("s", 1.0, 120.0), ("min", 60.0, 7200.0), ("h", 3600.0, float("inf")))
"""Name, seconds in the unit, and the shortest duration that takes the next unit."""
_MOST_UNITS = 10_000
_DIGITS = 3  # significant digits of the shortest duration


def duration_form(seconds: Iterable[float]) -> DurationForm:
    """Return the form for all of `seconds`: one unit, and the same number of decimals.

    The shortest duration decides, unless the longest would need more than four digits before the
    point.
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
