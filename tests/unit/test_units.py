"""Sizes, rates and times in the form that people write."""

from __future__ import annotations

import re
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
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("64k", 65536),
        ("64K", 65536),
        ("1MiB", 2**20),
        ("1m", 2**20),
        ("2.5GiB", 5 * 2**29),
        ("1TiB", 2**40),
        ("1kB", 1000),
        ("1MB", 10**6),
        ("5GB", 5 * 10**9),
        (" 16 MiB ", 2**24),
        (7, 7),
    ],
)
def test_sizes_are_understood(text: str | int, size: int) -> None:
    """Binary and bare letters are powers of 1024, KB to TB powers of 1000."""
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "k", "-1", "1x", "1iB", "1 2", "0.3k", "1.5", "1KiBB", "inf"])
def test_other_sizes_are_refused(text: str) -> None:
    """Text that is not a whole number of bytes is refused, and the message shows it."""
    with pytest.raises(OptionError) as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@given(st.integers(0, 2**50))
def test_exact_sizes_come_back(size: int) -> None:
    """parse_size reverses format_size_exact."""
    assert parse_size(format_size_exact(size)) == size


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0"),
        (4097, "4097"),
        (4096, "4KiB"),
        (2**24, "16MiB"),
        (3 * 2**40, "3TiB"),
        (5 * 10**9, "5GB"),
    ],
)
def test_exact_sizes(size: int, text: str) -> None:
    """The largest unit that divides a size is used."""
    assert format_size_exact(size) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (512, "512 B"), (1024, "1.00 KiB"), (4 * 2**30, "4.00 GiB"), (2**40, "1.00 TiB")],
)
def test_sizes_are_shown(size: int, text: str) -> None:
    """A size is shown in the largest unit that keeps it at one or more."""
    assert format_size(size) == text


def test_rates_are_shown_in_both_units() -> None:
    """GiB/s come first, GB/s in brackets."""
    assert format_rate(2.31 * 2**30) == "2.31 GiB/s (2.48 GB/s)"
    assert format_rate(2**30 / 10) == "0.10 GiB/s (0.11 GB/s)"
    assert format_rate(0) == "0.00 GiB/s (0.00 GB/s)"


def test_low_rates_are_shown_in_smaller_units() -> None:
    """Never as 0.00 of a unit that is too large."""
    assert format_rate(20 * 2**20) == "20.00 MiB/s (20.97 MB/s)"
    assert format_rate(2**20 / 10) == "0.10 MiB/s (0.10 MB/s)"
    assert format_rate(3000) == "2.93 KiB/s (3.00 kB/s)"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("500ms", 0.5), ("2min", 120), ("2m", 120), ("1h", 3600), (3, 3)],
)
def test_times_are_understood(text: str | float, seconds: float) -> None:
    """A number of Python is seconds."""
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "1w", "-3s", "1h30", "90", "0"])
def test_other_times_are_refused(text: str) -> None:
    """Other text is refused, and the message shows it."""
    with pytest.raises(OptionError) as caught:
        parse_seconds(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0032, "3.2 ms"), (4.211, "4.21 s"), (725, "12 min 5 s"), (12000, "3 h 20 min")],
)
def test_times_are_shown(seconds: float, text: str) -> None:
    """A time is shown in two units at most."""
    assert format_seconds(seconds) == text


def test_counts_have_a_plural() -> None:
    assert [count_of(n, "sample") for n in (0, 1, 2)] == ["0 samples", "1 sample", "2 samples"]


def test_percentages_need_their_sign() -> None:
    assert parse_percent("5%") == parse_percent(" 5 % ") == 0.05
    assert parse_percent("0.5%") == 0.005
    for text in ("5", "0.05", "-5%", "%", "five%"):
        with pytest.raises(OptionError, match="is not a percentage"):
            parse_percent(text)


def test_percentages_are_written_alike() -> None:
    """Like on the command line: 5%. A space would permit a line break between them."""
    root = Path(__file__).parents[2]
    texts = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "iobench").rglob("*.py")]
    assert len(texts) > 300
    apart = re.compile(r"(?<=[\d}]) %(?!\w)")
    assert [path.name for path in texts if apart.search(path.read_text(encoding="utf-8"))] == []
