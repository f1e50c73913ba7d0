"""Local: the directory of a Checkpointer, named as one of its tiers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from iobench.checkpoint.retention import Retention
from iobench.errors import OptionError

__all__ = ["Local"]


@dataclass(frozen=True)
class Local:
    """The local tier: the directory of the Checkpointer, in which a checkpoint is committed.

    - `directory`: that directory, if it is named at all
    - `keep`: which checkpoints stay there, like `keep` of the Checkpointer

    Without it in `tiers` there is a local tier too. Raises OptionError for values out of range.
    """

    directory: str | Path | None = None
    keep: Retention | None = None

    def __post_init__(self) -> None:
        if self.keep is not None and not isinstance(self.keep, Retention):
            raise OptionError(f"keep={self.keep!r}: takes a value such as KeepLast(3)")

    def check(self, location: str | Path) -> None:
        """Raise OptionError when `location` is another directory."""
        if (
            self.directory is not None
            and Path(self.directory).resolve() != Path(location).resolve()
        ):
            raise OptionError(
                f"tiers: Local({str(self.directory)!r}) must be the directory of the Checkpointer, "
                f"{str(location)!r}"
            )
