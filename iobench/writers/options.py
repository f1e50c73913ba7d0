"""Options of a writer: a frozen dataclass whose fields have a unit, a range and search values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Self, TypedDict, get_type_hints

from iobench.errors import OptionError, UnknownNameError
from iobench.units import GIB, KIB, format_size_exact, parse_size

_TRUE, _FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}


@dataclass(frozen=True, kw_only=True)
class OptionInfo:
    """The description of one option. Sizes have the unit "bytes"; users may write `16MiB`."""

    name: str
    type: type
    default: Any
    unit: str
    low: int | float | None
    high: int | float | None
    multiple_of: int | None
    choices: tuple[str, ...]
    search: tuple[Any, ...]
    help: str

    def parse(self, value: Any) -> Any:
        """Convert `value`, which may be text, to this option's type and check its range.

        Raises OptionError.
        """
        parsed = self._typed(value)
        if self.choices and parsed not in self.choices:
            raise self._error(value, f"one of {', '.join(self.choices)}")
        if (self.low is not None and parsed < self.low) or (
            self.high is not None and parsed > self.high
        ):
            raise self._error(value, f"from {self.show(self.low)} to {self.show(self.high)}")
        if self.multiple_of and parsed % self.multiple_of:
            raise self._error(value, f"a multiple of {self.show(self.multiple_of)}")
        return parsed

    def show(self, value: Any) -> str:
        """Return `value` in the form in which a user writes it."""
        if value is None:
            return "any"
        if isinstance(value, bool):
            return "true" if value else "false"
        if self.unit == "bytes":
            return format_size_exact(value)
        return str(value)

    def _typed(self, value: Any) -> Any:
        if self.type is bool:
            if isinstance(value, bool):
                return value
            if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
                return value.lower() in _TRUE
            raise self._error(value, "true or false")
        if self.type in (int, float):
            try:
                if self.unit == "bytes" and isinstance(value, str):
                    return parse_size(value)
                parsed = self.type(value)
                # NaN is not equal to itself.
                exact = parsed == (parsed if isinstance(value, str) else value)
                if exact and not isinstance(value, bool):
                    return parsed
            except (TypeError, ValueError, OverflowError):
                pass
            raise self._error(value, "a size such as 16MiB" if self.unit == "bytes" else "a number")
        if self.type is str and isinstance(value, str):
            return value
        raise self._error(value, f"a {self.type.__name__}")

    def _error(self, value: Any, allowed: str) -> OptionError:
        unit = f" ({self.unit})" if self.unit and self.unit != "bytes" else ""
        return OptionError(f"option {self.name}={value}: must be {allowed}{unit}")


def option(
    default: Any,
    *,
    help: str,  # noqa: A002 -- the field's word, as in every command-line library
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    multiple_of: int | None = None,
    choices: tuple[str, ...] = (),
    search: tuple[Any, ...] = (),
) -> Any:
    """Declare a field of a WriterOptions class. `search` lists the values that a tuner tries."""
    known = {
        "help": help,
        "unit": unit,
        "low": low,
        "high": high,
        "multiple_of": multiple_of,
        "choices": choices,
        "search": search,
    }
    return dataclasses.field(default=default, metadata=known)


def block_size_option(default: int, *, search: tuple[int, ...], help: str) -> Any:  # noqa: A002 -- like `option`
    """Declare the bytes of one operation: 4 KiB to 1 GiB, in multiples that every device takes."""
    limits: dict[str, Any] = {"low": 4 * KIB, "high": GIB, "multiple_of": 4 * KIB}
    return option(default, unit="bytes", search=search, help=help, **limits)


@dataclass(frozen=True, kw_only=True)
class WriterOptions:
    """Base of every writer's options. The constructor checks the values and accepts text."""

    def __post_init__(self) -> None:
        for info in self.describe():
            object.__setattr__(self, info.name, info.parse(getattr(self, info.name)))

    @classmethod
    @cache  # a tuning makes thousands of options, and reading type hints takes 0.3 ms
    def describe(cls) -> list[OptionInfo]:
        """Return every option, in the order of declaration."""
        types = get_type_hints(cls)
        return [
            OptionInfo(name=f.name, type=types[f.name], default=f.default, **f.metadata)
            for f in dataclasses.fields(cls)
        ]

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Make options from names and values (text or typed).

        Raises UnknownNameError, OptionError.
        """
        known = [f.name for f in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                raise UnknownNameError("option", name, known)
        return cls(**values)

    def changed(self) -> list[str]:
        """Return `name=value` of each option that differs from its default."""
        return [
            f"{info.name}={info.show(getattr(self, info.name))}"
            for info in self.describe()
            if getattr(self, info.name) != info.default
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return names and plain values (bytes as int). `from_mapping` makes equal options."""
        return dataclasses.asdict(self)


# The options as keywords, for type checkers: `ODirectWriter(thread=2)` raises OptionError, and with
# these types mypy and editors report it before. tests/unit/writers/test_options.py compares both.
# Sizes may be text: "16MiB".


class NullValues(TypedDict, total=False):
    block_size: int | str
    threads: int


class DirectValues(NullValues, total=False):
    fallocate: bool


class UncachedValues(DirectValues, total=False):
    method: str


class AiofilesValues(TypedDict, total=False):
    block_size: int | str
    iodepth: int
    files: int
    fallocate: bool


class UringValues(TypedDict, total=False):
    iodepth: int
    block_size: int | str
    rings: int
    direct: bool
    fallocate: bool


class HybridValues(TypedDict, total=False):
    block_size: int | str
    iodepth: int
    uring: bool
    small_size: int | str
    paths: str
    read_soon: bool
    fallocate: bool


class S3Values(TypedDict, total=False):
    part_size: int | str
    threads: int
    checksum: str
    endpoint_url: str
    addressing_style: str
    verify_tls: bool
    max_pool: int
    max_attempts: int
    connect_timeout_s: float
    read_timeout_s: float
