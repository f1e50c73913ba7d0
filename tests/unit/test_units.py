"""Sizes, rates and times in the form that people write."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iobench.errors import OptionError
from iobench.units import (
    count_of,
    format_rate,
    format_seconds,
    format_size,
    format_size_exact,
    parse_percent,
    parse_seconds,
    parse_size,
)


@pytest.mark.parametrize(
    ("parse", "values"),
    [
        # Binary and bare letters are powers of 1024, KB to TB powers of 1000.
        (parse_size, {"0": 0, "4096": 4096, "64k": 65536, "64K": 65536, 7: 7, " 16 MiB ": 2**24}),
        (parse_size, {"1MiB": 2**20, "1m": 2**20, "2.5GiB": 5 * 2**29, "1TiB": 2**40}),
        (parse_size, {"1kB": 1000, "1MB": 10**6, "5GB": 5 * 10**9}),
        # A number of Python is seconds.
        (parse_seconds, {"90s": 90, "500ms": 0.5, "2min": 120, "2m": 120, "1h": 3600, 3: 3}),
        (parse_percent, {"5%": 0.05, " 5 % ": 0.05, "0.5%": 0.005}),
    ],
)
def test_what_is_understood(
    parse: Callable[[str | int], float], values: dict[str | int, float]
) -> None:
    assert {text: parse(text) for text in values} == values


@pytest.mark.parametrize(
    ("parse", "texts"),
    [
        (parse_size, ["", "k", "-1", "1x", "1iB", "1 2", "0.3k", "1.5", "1KiBB", "inf"]),
        (parse_seconds, ["", "s", "1w", "-3s", "1h30", "90", "0"]),
        (parse_percent, ["5", "0.05", "-5%", "%", "five%"]),
    ],
)
def test_other_text_is_refused(parse: Callable[[str], float], texts: list[str]) -> None:
    """Text that is not a whole number of bytes, a time or a percentage. The message shows it."""
    for text in texts:
        with pytest.raises(OptionError, match=re.escape(repr(text))):
            parse(text)


@given(st.integers(0, 2**50))
def test_exact_sizes_come_back(size: int) -> None:
    """parse_size reverses format_size_exact."""
    assert parse_size(format_size_exact(size)) == size


@pytest.mark.parametrize(
    ("show", "values"),
    [
        # The largest unit that divides a size.
        (format_size_exact, {0: "0", 4097: "4097", 4096: "4KiB", 2**24: "16MiB"}),
        (format_size_exact, {3 * 2**40: "3TiB", 5 * 10**9: "5GB"}),
        # The largest unit that keeps it at one or more.
        (format_size, {0: "0 B", 512: "512 B", 1024: "1.00 KiB", 2**32: "4.00 GiB"}),
        (format_size, {2**40: "1.00 TiB"}),
        # GiB/s come first, GB/s in brackets; never 0.00 of a unit that is too large.
        (format_rate, {2.31 * 2**30: "2.31 GiB/s (2.48 GB/s)", 0: "0.00 GiB/s (0.00 GB/s)"}),
        (format_rate, {2**30 / 10: "0.10 GiB/s (0.11 GB/s)", 3000: "2.93 KiB/s (3.00 kB/s)"}),
        (
            format_rate,
            {20 * 2**20: "20.00 MiB/s (20.97 MB/s)", 2**20 / 10: "0.10 MiB/s (0.10 MB/s)"},
        ),
        # Two units at most.
        (format_seconds, {0.0032: "3.2 ms", 4.211: "4.21 s", 725: "12 min 5 s"}),
        (format_seconds, {12000: "3 h 20 min"}),
        (lambda n: count_of(n, "sample"), {0: "0 samples", 1: "1 sample", 2: "2 samples"}),
    ],
)
def test_what_is_shown(show: Callable[[float], str], values: dict[float, str]) -> None:
    assert {value: show(value) for value in values} == values


def test_percentages_are_written_alike() -> None:
    """Like on the command line: 5%. A space would permit a line break between them."""
    root = Path(__file__).parents[2]
    texts = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "iobench").rglob("*.py")]
    assert len(texts) > 300
    apart = re.compile(r"(?<=[\d}]) %(?!\w)")
    assert [path.name for path in texts if apart.search(path.read_text(encoding="utf-8"))] == []
