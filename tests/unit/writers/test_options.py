"""Options: parsed, checked, and named in every message; known to type checkers as keywords."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iobench import writers
from iobench.errors import OptionError
from iobench.units import KIB, MIB
from iobench.writers import options, registry
from iobench.writers.options import WriterOptions, option


@dataclass(frozen=True, kw_only=True)
class _Options(WriterOptions):
    block_size: int = option(
        MIB, unit="bytes", low=4 * KIB, high=64 * MIB, multiple_of=4 * KIB, help="h"
    )
    threads: int = option(2, low=1, high=256, search=(1, 2), help="h")
    deadline: float = option(1.5, unit="seconds", low=0, help="h")
    fallocate: bool = option(True, help="h")
    method: str = option("auto", choices=("auto", "never"), help="h")


@pytest.mark.parametrize(
    ("name", "value", "parsed"),
    [
        ("block_size", "4k", 4 * KIB),
        ("block_size", "64MiB", 64 * MIB),
        ("block_size", 8192, 8192),
        ("threads", "256", 256),
        ("threads", 3.0, 3),
        ("deadline", "2", 2.0),
        ("deadline", 0, 0.0),
        ("fallocate", "OFF", False),
        ("fallocate", "yes", True),
        ("fallocate", False, False),
        ("method", "never", "never"),
    ],
)
def test_values_are_understood(name: str, value: object, parsed: object) -> None:
    """Text and numbers become the option's type."""
    found = getattr(_Options(**{name: value}), name)
    assert found == parsed
    assert type(found) is type(parsed)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("block_size", 4095, "from 4KiB to 64MiB"),
        ("block_size", "65MiB", "from 4KiB to 64MiB"),
        ("block_size", 4097, "a multiple of 4KiB"),
        ("block_size", "many", "a size such as 16MiB"),
        ("block_size", -4096, "from 4KiB to 64MiB"),
        ("block_size", None, "a size such as 16MiB"),
        ("threads", 0, "from 1 to 256"),
        ("threads", "257", "from 1 to 256"),
        ("threads", "2.5", "a number"),
        ("threads", 2.5, "a number"),
        ("threads", True, "a number"),
        ("threads", [1], "a number"),
        ("threads", float("inf"), "a number"),
        ("threads", float("nan"), "a number"),
        ("deadline", -0.5, "from 0 to any (seconds)"),
        ("deadline", float("nan"), "a number"),
        ("deadline", "nan", "a number"),
        ("fallocate", "maybe", "true or false"),
        ("fallocate", 1, "true or false"),
        ("method", "always", "one of auto, never"),
        ("method", 3, "a str"),
    ],
)
def test_other_values_are_refused(name: str, value: object, allowed: str) -> None:
    """The message names the option, the value and what is allowed."""
    with pytest.raises(OptionError) as caught:
        _Options(**{name: value})
    assert f"option {name}={value}: must be {allowed}" in str(caught.value)


@given(
    st.builds(
        dict,
        block_size=st.integers(1, 16384).map(lambda n: n * 4096),
        threads=st.integers(1, 256),
        deadline=st.floats(0, 1e9),
        fallocate=st.booleans(),
        method=st.sampled_from(["auto", "never"]),
    )
)
def test_round_trips(values: dict[str, object]) -> None:
    """Plain values and shown text both give equal options back."""
    options = _Options(**values)
    assert _Options.from_mapping(options.to_dict()) == options
    shown = {info.name: info.show(getattr(options, info.name)) for info in options.describe()}
    assert _Options.from_mapping(shown) == options


def test_describe_is_complete() -> None:
    """Options are described in the order declared, with all that a tuner and a help page need."""
    infos = _Options.describe()
    assert [info.name for info in infos] == [
        *("block_size", "threads", "deadline", "fallocate", "method")
    ]
    assert infos[1].search == (1, 2)
    assert (infos[0].type, infos[0].default, infos[0].unit) == (int, MIB, "bytes")


_VALUES = {
    "aiofiles": options.AiofilesValues,
    "buffered": options.DirectValues,
    "gds": options.DirectValues,
    "hybrid": options.HybridValues,
    "null": options.NullValues,
    "odirect": options.DirectValues,
    "s3": options.S3Values,
    "uncached": options.UncachedValues,
    "uring": options.UringValues,
}


@pytest.mark.parametrize("name", registry.names())
def test_the_keywords_are_the_options(name: str) -> None:
    """Names and types; a size may be text, too."""
    options, found = registry.writer_class(name).Options, get_type_hints(_VALUES[name])
    hints = get_type_hints(options)
    sizes = {one.name for one in options.describe() if one.unit == "bytes"}
    expected = {
        field.name: int | str if field.name in sizes else hints[field.name]
        for field in dataclasses.fields(options)
    }
    assert found == expected


@pytest.mark.parametrize("name", registry.names())
def test_each_writer_can_be_imported_from_the_package(name: str) -> None:
    found = registry.writer_class(name)
    assert getattr(writers, found.__name__) is found


@pytest.mark.parametrize("name", registry.names())
def test_a_misspelt_option_is_refused_by_mypy(name: str) -> None:
    """`make check` fails where mypy does not refuse a call of this file."""
    calls = Path(__file__).with_name("misspelt_options.py").read_text()
    assert f"\nwriters.{registry.writer_class(name).__name__}(thread=2)  #" in calls
