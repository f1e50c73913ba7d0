"""Facts in words, for doctor, reports, comparisons and `writer.toml`.

Machine, Storage and Device put themselves into words by these helpers. Facts that a record lacks
are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from iobench.units import format_size


@dataclass(frozen=True)
class Fact:
    """One fact in words. `subject` is that of advice about it; empty where nothing checks it."""

    name: str
    words: str
    subject: str = ""

    @classmethod
    def known(cls, facts: Iterable[tuple[str, object] | tuple[str, object, str]]) -> list[Fact]:
        """Return those that are known, from names, words and subjects."""
        return [cls(name, str(words), *subject) for name, words, *subject in facts if words]


def size_of(value: int | None, form: str = "{}") -> str | None:
    """Return a size in `form`; None if it is unknown or 0."""
    return form.format(format_size(value)) if value else None


def joined(*known: object) -> str:
    return ", ".join(str(one) for one in known if one)
