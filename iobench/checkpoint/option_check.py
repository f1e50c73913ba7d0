"""check_option: the type of an option of a Checkpointer."""

from __future__ import annotations

from iobench.errors import OptionError

__all__ = ["check_option"]


def check_option(name: str, value: object, *classes: type, example: str) -> None:
    """Raise OptionError unless `value` is of one of the `classes`. A bool is not a number here."""
    if not isinstance(value, classes) or (isinstance(value, bool) and bool not in classes):
        raise OptionError(f"{name}={value!r}: takes a value such as {example}")
