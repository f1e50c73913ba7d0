"""Parsing and formatting of sizes, times, percentages and rates. Inside iobench: bytes and seconds.

`64k`, `1MiB`, `4GiB` are powers of 1024; `1MB`, `1GB` are powers of 1000. A bare letter is binary,
as in fio. Rates have GiB/s first and GB/s in brackets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fractions import Fraction

from iobench.errors import OptionError

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_BINARY = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": TIB}
_NUMBER = r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*"
"""Beyond thousands of digits `int` raises ValueError, and beyond 308 a float is infinite."""
_SIZE = re.compile(_NUMBER + r"([kmgt]?)(i?)(b?)\s*", re.IGNORECASE)
_TIME = re.compile(_NUMBER + r"(ms|s|min|m|h|d)?\s*")
_PERCENT = re.compile(_NUMBER + r"%\s*")
_SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_size(text: str | int, option: str = "") -> int:
    """Return the bytes in `text`: `4096`, `64k`, `1MiB`, `2.5GiB`, `1MB`; units as above.

    Raises OptionError, which names `option`, for any other text, for negative numbers and for
    fractions of a byte.
    """
    if isinstance(text, int):
        if text < 0:
            raise _error(option, f"{text} is not a size: it is negative")
        return text
    match = _SIZE.fullmatch(text)
    if not match or (match[3] and not match[2]):
        raise _error(option, f"{text!r:.40} is not a size; write 4096, 64k, 16MiB, 4GiB or 5GB")
    number, letter, binary, b = match.groups()
    power = "kmgt".find(letter.lower()) + 1 if letter else 0
    factor = 1000**power if (b and letter and not binary) else _BINARY[letter.lower()]
    size = Fraction(number) * factor
    if size.denominator != 1:
        raise _error(option, f"{text!r:.40} is {float(size)} bytes: not a whole number")
    return int(size)


def parse_seconds(text: str | float, option: str = "") -> float:
    """Return the seconds in `text`: `90s`, `500ms`, `2min`, `1h`, `3d`. A number is seconds.

    Raises OptionError, which names `option`, for any other text, also without a unit.
    """
    if isinstance(text, int | float):
        return float(text)
    match = _TIME.fullmatch(text)
    if not match:
        raise _error(option, f"{text!r:.40} is not a time; write 500ms, 90s, 2min, 1h or 3d")
    number, unit = match.groups()
    if unit is None:
        raise _error(option, f"{text!r:.40} has no unit; write {number:.20}s or {number:.20}min")
    return float(number) * _SECONDS[unit]


def parse_percent(text: str, option: str = "") -> float:
    """Return the fraction in `text`: 0.05 for `5%`.

    Raises OptionError, which names `option`, for any other text, also without the sign.
    """
    match = _PERCENT.fullmatch(text)
    if not match:
        raise _error(option, f"{text!r:.40} is not a percentage; write 5% or 0.5%")
    return float(Fraction(match[1]) / 100)


def _error(option: str, problem: str) -> OptionError:
    return OptionError(f"{option} {problem}" if option else problem)


def format_size(size_bytes: float) -> str:
    """Return the size in the largest binary unit not above it: `4.00 GiB`, `512 B`."""
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(size_bytes) >= factor:
            return f"{size_bytes / factor:.2f} {unit}"
    return f"{size_bytes:.0f} B"


def format_size_exact(size_bytes: int) -> str:
    """Return text that `parse_size` turns back into `size_bytes`: `16MiB`, `5GB`, `4097`."""
    binary = (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
    for unit, factor in (*binary, ("GB", 10**9)):
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}"
    return str(size_bytes)


def count_of(number: int, noun: str) -> str:
    """Return `1 sample` or `3 samples` for the noun `sample`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def format_rate(rate_bytes_per_s: float) -> str:
    """Return the rate as `2.31 GiB/s (2.48 GB/s)`; a low one as `5.00 MiB/s (5.24 MB/s)`."""
    units = (("GiB", GIB, "GB", 1e9), ("MiB", MIB, "MB", 1e6), ("KiB", KIB, "kB", 1e3))
    found = next((one for one in units if abs(rate_bytes_per_s) >= one[1] / 10), units[-1])
    binary, factor, decimal, thousands = found if rate_bytes_per_s else units[0]
    return (
        f"{rate_bytes_per_s / factor:.2f} {binary}/s "
        f"({rate_bytes_per_s / thousands:.2f} {decimal}/s)"
    )


def in_gib(size_bytes: float, factor: float = GIB) -> str:
    """Return bytes, or a rate, in GiB without the unit: `2.31`; below 0.1 two digits: `0.0098`.

    `factor` is another unit.
    """
    value = size_bytes / factor
    return f"{value:.2f}" if abs(value) >= 0.1 or not value else f"{value:#.2g}"


def format_seconds(seconds: float) -> str:
    """Return the time as `3.2 ms`, `4.21 s`, `12 min 5 s` or `3 h 20 min`."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


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
