"""Candidate: one writer at one setting, and where it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from iobench.writers import registry
from iobench.writers.base import Writer
from iobench.writers.options import WriterOptions

__all__ = ["Candidate", "Origin"]

Origin = Literal["baseline", "known-good", "drawn", "refined"]
"""`baseline` is what the winner is compared with, `known-good` a setting that is known to do well
somewhere, `drawn` a random one of the space, `refined` one near a leader."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A writer with all its options. Equal in everything but `origin`, two have one `label`."""

    writer: str
    options: WriterOptions
    origin: Origin

    @classmethod
    def of(cls, writer: str, values: Mapping[str, Any], origin: Origin) -> Candidate:
        """From a name and some options. Raises what `registry.make` raises."""
        made = registry.make(writer, **values)
        return cls(writer=made.name, options=made.options, origin=origin)

    @property
    def label(self) -> str:
        """The name and the options that are not at their defaults, as `--writer` takes them."""
        return ",".join([self.writer, *self.options.changed()])

    @property
    def well_known(self) -> bool:
        """Whether it is a setting that was known before this tuning."""
        return self.origin in ("baseline", "known-good")

    def make(self) -> Writer:
        """A new writer."""
        return registry.writer_class(self.writer)(self.options)
