"""Writers by name: entry points in the group `iobench.writers`, ours and third parties' alike."""

from __future__ import annotations

import dataclasses
import functools
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from iobench.errors import UnavailableError, UnknownNameError, UsageError
from iobench.writers.base import Writer

__all__ = ["GROUP", "Registry", "make", "names", "parse_specs", "split_specs", "writer_class"]

GROUP = "iobench.writers"

T = TypeVar("T")


class Registry(Generic[T]):
    """The classes that entry points of one group name, those of this package included.

    `base` is what all of them derive from. `noun` says what they are, `prefix` comes before a name
    where a user reads it.
    """

    def __init__(self, group: str, base: type[Any], *, noun: str, prefix: str = "") -> None:
        self.group, self._base, self._noun, self._prefix = group, base, noun, prefix

    @functools.cached_property
    def entries(self) -> dict[str, EntryPoint]:
        """The entry points by name; read once, as each one is a file of an installed package."""
        return {entry.name: entry for entry in entry_points(group=self.group)}

    def names(self) -> list[str]:
        """Every registered name, whether its class works here or not."""
        return sorted(self.entries)

    def find(self, name: str) -> type[T]:
        """The class registered as `name`; imported now.

        Raises UnknownNameError; UnavailableError where it cannot be imported or derives from
        something else.
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


_WRITERS: Registry[Writer] = Registry(GROUP, Writer, noun="writer")


def names() -> list[str]:
    """Every registered writer, whether it works here or not."""
    return _WRITERS.names()


def writer_class(name: str) -> type[Writer]:
    """The class registered as `name`; imported now. Raises UnknownNameError, UnavailableError."""
    return _WRITERS.find(name)


def make(name: str, /, **values: Any) -> Writer:
    """A writer by name with some options set: `make("odirect", block_size="8MiB")`."""
    cls = writer_class(name)
    return cls(cls.Options.from_mapping(values))


def split_specs(text: str) -> list[tuple[str, dict[str, str]]]:
    """Names, each with its options, from `uring,iodepth=16,block_size=4MiB,odirect`.

    A token with `=` is an option of the name before it. Raises UsageError.
    """
    chosen: list[tuple[str, dict[str, str]]] = []
    for token in (part.strip() for part in text.split(",")):
        key, equals, value = (part.strip() for part in token.partition("="))
        if not token:
            raise UsageError(f"--writer {text!r}: an empty name between commas")
        if not equals and chosen and _is_option(token, chosen[-1][0]):
            raise UsageError(f"--writer {text!r}: option {token!r} has no value; write {token}=...")
        if not equals:
            chosen.append((token, {}))
        elif not chosen:
            raise UsageError(f"--writer {text!r}: option {token!r} has no writer before it")
        elif key in chosen[-1][1]:
            raise UsageError(f"--writer {text!r}: option {key!r} twice for {chosen[-1][0]}")
        else:
            chosen[-1][1][key] = value
    return chosen


def _is_option(token: str, writer: str) -> bool:
    """Whether `token`, which might be a writer's name, is an option of the writer before it."""
    known = names()
    if token in known or writer not in known:
        return False
    return token in {field.name for field in dataclasses.fields(writer_class(writer).Options)}


def parse_specs(text: str) -> list[Writer]:
    """The writers that `split_specs` names, each once. Raises UsageError and its kin."""
    writers = [make(name, **values) for name, values in split_specs(text)]
    for index, writer in enumerate(writers):
        if any(w.name == writer.name and w.options == writer.options for w in writers[:index]):
            raise UsageError(f"--writer {text!r}: {writer.name} with the same options twice")
    return writers
