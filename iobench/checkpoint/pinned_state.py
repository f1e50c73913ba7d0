"""PinnedState: optimizer state on storage whose pinned generations belong to checkpoints."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from iobench.checkpoint.manifest import FileRecord, Manifest, PinnedGeneration
from iobench.writers.base import Writer
from iobench.writers.image import FileImage

__all__ = ["FoundPin", "PinnedGeneration", "PinnedState", "described_pin"]


@dataclass(frozen=True, kw_only=True)
class FoundPin:
    """A pin that is durable."""

    name: str
    step: int
    own: bool
    """Whether the Checkpointer that asks holds it."""


class PinnedState(Protocol):
    """What a Checkpointer needs of an optimizer; iobench.offload.HeldPins has it."""

    @property
    def most(self) -> int:
        """How many pins there can be."""

    @property
    def closed(self) -> bool:
        """Whether the optimizer is closed."""

    def found(self, owner: str) -> list[FoundPin]:
        """Wait until all is durable, and return the pins that are held, by `owner` or others."""

    def hold(self, step: int, owner: str) -> str:
        """Pin the state after the last step; return the name of the pin. Waits for nothing."""

    def release(self, names: Collection[str]) -> None:
        """Release pins. Waits for nothing."""

    def wait(self) -> None:
        """Wait until all is durable. Raises the failure of the engine."""

    def durable(self, name: str) -> PinnedGeneration:
        """Wait until the pin is durable. For any thread. Raises TransferError."""

    def restore(self, pinned: PinnedGeneration) -> None:
        """Go on from this generation. Raises DataMismatchError when it is damaged or gone."""

    def export(self, pinned: PinnedGeneration) -> tuple[PinnedGeneration, FileImage]:
        """Return `pinned` with its files for a remote tier, and a small file that describes them.

        The small one belongs to the files of the checkpoint. For any thread.
        """

    def open_file(self, pinned: PinnedGeneration, record: FileRecord) -> Any:
        """Open one of `pinned.files`: an iobench.remote.source_file.SourceFile. For any thread."""

    def restore_files(self, manifest: Manifest, location: Any, writer: Writer) -> None:
        """Go on from the files of a checkpoint at `location`, as a new generation of this state.

        It is durable on return. Raises DataMismatchError, StateMismatchError, TransferError.
        """


def described_pin(
    state: PinnedState, name: str, *, exports: bool
) -> tuple[PinnedGeneration, list[FileImage]]:
    """Wait until the pin is durable. Return it, and with `exports` what a remote tier needs of it.

    Those are its `files`, and small files of the checkpoint. Raises TransferError.
    """
    pinned = state.durable(name)
    if not exports:
        return pinned, []
    pinned, described = state.export(pinned)
    return pinned, [described]
