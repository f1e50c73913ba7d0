"""Checks of the options of a Checkpointer."""

from __future__ import annotations

from typing import get_args

from iobench.errors import OptionError
from iobench.units import parse_size
from iobench.writers.blocks.channel import OnFull

__all__ = ["check_flags", "check_option", "check_slots", "rate_limit"]


def check_option(name: str, value: object, *classes: type, example: str) -> None:
    """Raise OptionError unless `value` is of one of the `classes`. A bool is not a number here."""
    if not isinstance(value, classes) or (isinstance(value, bool) and bool not in classes):
        raise OptionError(f"{name}={value!r}: takes a value such as {example}")


def check_flags(**flags: object) -> None:
    """Raise OptionError unless each is a bool."""
    for name, value in flags.items():
        check_option(name, value, bool, example="True")


def check_slots(slots: object, on_full: object) -> None:
    """Raise OptionError unless there is a slot, and a rule for a time without a free one."""
    if type(slots) is not int or slots < 1:
        raise OptionError(f"slots={slots!r}: a whole number, 1 or more")
    if on_full not in get_args(OnFull):
        raise OptionError(f"on_full={on_full!r}: 'wait', 'skip' or 'supersede'")


def rate_limit(given: int | str | None) -> int | None:
    """Return `bandwidth_limit` in bytes per second. Raises OptionError for 0."""
    limit = None if given is None else parse_size(given)
    if limit == 0:
        raise OptionError("bandwidth_limit=0: must be at least 1 byte per second")
    return limit
