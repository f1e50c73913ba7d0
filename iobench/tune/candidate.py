"""Candidate: one writer at one setting, and its origin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from iobench.writers import registry
from iobench.writers.base import Writer
from iobench.writers.options import WriterOptions

__all__ = ["Candidate", "Origin"]

Origin = Literal["baseline", "known-good", "drawn", "refined"]
"""`baseline`: the setting that the winner is compared with. `known-good`: a setting that did well
on some storage before. `drawn`: a random setting of the space. `refined`: one near a leader."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A writer with all its options. Candidates that differ only in `origin` have equal labels."""

    writer: str
    options: WriterOptions
    origin: Origin

    @classmethod
    def of(cls, writer: str, values: Mapping[str, Any], origin: Origin) -> Candidate:
        """Make a candidate from a name and some options. Raises what `registry.make` raises."""
        made = registry.make(writer, **values)
        return cls(writer=made.name, options=made.options, origin=origin)

    @property
    def label(self) -> str:
        """The name and the options that are not at their defaults, in the syntax of `--writer`."""
        return ",".join([self.writer, *self.options.changed()])

    @property
    def well_known(self) -> bool:
        """Whether the setting was known before this tuning."""
        return self.origin in ("baseline", "known-good")

    def make(self) -> Writer:
        """Return a new writer."""
        return registry.writer_class(self.writer)(self.options)
