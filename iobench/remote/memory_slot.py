"""MemorySlot: memory for one snapshot, in one memory tier or spread over several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from iobench import linux
from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.save import Save
from iobench.checkpoint.slots import Slot
from iobench.remote.address_range import AddressRange
from iobench.writers.image import Bytes, FileImage

__all__ = ["Kept", "MemorySlot", "SlotPart"]


@dataclass(frozen=True, kw_only=True)
class SlotPart:
    """Bytes of a slot that are in the tier of this name; `lazy`: without pages at first."""

    tier: str
    size_bytes: int
    last_address: int
    lazy: bool

    @property
    def missing_bytes(self) -> int:
        """Bytes without pages; pages are made from the begin to the end."""
        if self.lazy and not linux.has_page(self.last_address):
            return self.size_bytes
        return 0


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A committed checkpoint whose bytes are in a slot, until another snapshot takes it.

    `files` gets the memory of the slot, and returns what it has of the checkpoint. `manifest` is
    that of a checkpoint of one process.
    """

    step: int
    serial: int
    files: Callable[[Bytes], list[FileImage]]
    manifest: Manifest | None = None


class MemorySlot(Slot):
    """A slot in memory tiers. To writers and copies it is one piece of memory.

    `save` is the save that took it last. `kept` is set once this save is committed.
    """

    def __init__(self, number: int, room: AddressRange, parts: tuple[SlotPart, ...]) -> None:
        super().__init__()
        self.number, self.parts = number, parts
        self.memory = room.array()
        self.busy = False
        self.save: Save | None = None
        self.kept: Kept | None = None

    @property
    def tiers(self) -> str:
        """The tiers in which it is, fastest first."""
        return " + ".join(part.tier for part in self.parts)

    def bytes_by_tier(self) -> dict[str, int]:
        """Return its bytes in each tier."""
        return {part.tier: part.size_bytes for part in self.parts}

    def free(self) -> None:
        self.parts, self.kept, self.save = (), None, None
        super().free()

    def __lt__(self, other: Any) -> bool:
        """Slots that were made first are in the faster memory."""
        return bool(self.number < other.number)
