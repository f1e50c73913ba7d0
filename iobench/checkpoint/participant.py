"""SaveParticipant: state that belongs to checkpoints and is on storage already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from iobench.checkpoint.manifest import Manifest, PinnedGeneration
from iobench.checkpoint.retention import Retention
from iobench.checkpoint.save import Save
from iobench.checkpoint.store import CheckpointStore
from iobench.writers.base import Writer
from iobench.writers.image import FileImage

__all__ = ["RemoteCopyOf", "SaveParticipant"]

RemoteCopyOf = Callable[[Manifest], tuple[str | Path, Writer] | None]
"""Returns where a remote tier has this very checkpoint, and its writer; None if it has not."""


class SaveParticipant(Protocol):
    """The state of an optimizer that is not in the files of a checkpoint.

    A save holds it as it is, which copies nothing, and the manifest names what it holds. So the
    manifest is written when that is durable. `durable` and `ended` are called by the thread that
    commits, the rest by the trainer's.
    """

    exports: bool
    """Whether a remote tier gets the state too, so that files of the checkpoint describe it."""

    @property
    def full(self) -> bool:
        """Whether nothing more can be held."""

    def check(self, *, keep: Retention | None, placed: bool, tiers: Sequence[Any]) -> None:
        """Raise OptionError for options of a Checkpointer that it does not go together with."""

    def open(self, store: CheckpointStore, drain: Any) -> None:
        """Take part in the saves to `store`; `drain` copies them to a remote tier, or is None."""

    def start(self) -> None:
        """Look which checkpoints there are; release what no checkpoint needs."""

    def make_room(self, *ways: Callable[[], None]) -> None:
        """Release what is free; while nothing more can be held, try the `ways` to free something.

        Raises UsageError when nothing can be freed.
        """

    def hold(self, save: Save) -> None:
        """Hold the state as it is now, for `save`."""

    def durable(self, save: Save) -> tuple[PinnedGeneration, list[FileImage]]:
        """Wait until what `save` holds is durable. Return it, and the files that describe it."""

    def ended(self, save: Save) -> None:
        """The commit of `save` has ended, or failed."""

    def settle(self) -> None:
        """Wait until what pending saves hold is durable. Raises why it never will be."""

    def sweep(self) -> None:
        """Release what no checkpoint and no pending save needs."""

    def restore(self, manifest: Manifest, remote_copy: RemoteCopyOf | None) -> None:
        """Go on from the state of this checkpoint. Raises DataMismatchError."""
