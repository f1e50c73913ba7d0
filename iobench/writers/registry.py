"""Finds writers by name: built-in and third-party entry points of the group `iobench.writers`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from iobench.errors import OptionError, UnavailableError, UnknownNameError, UsageError
from iobench.writers.base import Writer

GROUP = "iobench.writers"

T = TypeVar("T")


class Registry(Generic[T]):
    """The classes of the entry points of one group, including those of this package.

    All derive from `base`. Messages call them `noun`, and put `prefix` before a name.
    """

    def __init__(self, group: str, base: type[Any], *, noun: str, prefix: str = "") -> None:
        self.group, self._base, self._noun, self._prefix = group, base, noun, prefix

    @functools.cached_property
    def entries(self) -> dict[str, EntryPoint]:
        """The entry points by name. They are read once, from a file of each installed package."""
        return {entry.name: entry for entry in entry_points(group=self.group)}

    def names(self) -> list[str]:
        """Return every registered name, even if its class does not work here."""
        return sorted(self.entries)

    def find(self, name: str) -> type[T]:
        """Import and return the class registered as `name`.

        Raises UnknownNameError, and UnavailableError if the import fails or the class does not
        derive from the base.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise UnknownNameError(self._noun, name, self.names())
        shown = f"{self._prefix}{name}"
        try:
            found = entry.load()
        except (ImportError, AttributeError) as error:
            raise UnavailableError(shown, f"it cannot be imported ({error}).") from error
        if not (isinstance(found, type) and issubclass(found, self._base)):
            raise UnavailableError(shown, f"{entry.value} is not a {self._base.__name__}.")
        return found

    def make(self, name: str, values: Mapping[str, Any]) -> T:
        """Make the object `name` with some options; an error of an option names it."""
        cls: Any = self.find(name)
        try:
            made: T = cls(cls.Options.from_mapping(values))
        except (UnknownNameError, OptionError) as error:
            error.args = (f"{self._noun} {name}: {error}",)
            raise
        return made


_WRITERS: Registry[Writer] = Registry(GROUP, Writer, noun="writer")


def names() -> list[str]:
    """Return the name of every registered writer, even if it does not work here."""
    return _WRITERS.names()


def writer_class(name: str) -> type[Writer]:
    """Import and return the class of a writer. Raises UnknownNameError, UnavailableError."""
    return _WRITERS.find(name)


def make(name: str, /, **values: Any) -> Writer:
    """Make a writer by name with some options: `make("odirect", block_size="8MiB")`."""
    return _WRITERS.make(name, values)


def split_specs(text: str) -> list[tuple[str, dict[str, str]]]:
    """Split `uring,iodepth=16,block_size=4MiB,odirect` into names with their options.

    A token with `=` is an option of the name before it. Raises UsageError.
    """
    chosen: list[tuple[str, dict[str, str]]] = []
    for token in (part.strip() for part in text.split(",")):
        key, equals, value = (part.strip() for part in token.partition("="))
        if not token:
            raise UsageError(f"writer {text!r}: an empty name between commas")
        if not equals and chosen and _is_option(token, chosen[-1][0]):
            raise UsageError(f"writer {text!r}: option {token!r} has no value; write {token}=...")
        if not equals:
            chosen.append((token, {}))
        elif not chosen:
            raise UsageError(f"writer {text!r}: option {token!r} has no writer before it")
        elif key in chosen[-1][1]:
            raise UsageError(f"writer {text!r}: option {key!r} twice for {chosen[-1][0]}")
        else:
            chosen[-1][1][key] = value
    return chosen


def _is_option(token: str, writer: str) -> bool:
    """Whether `token` is not a writer's name but an option of `writer`, the name before it."""
    known = names()
    if token in known or writer not in known:
        return False
    return token in {field.name for field in dataclasses.fields(writer_class(writer).Options)}
