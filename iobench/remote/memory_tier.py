"""MemoryTier: one memory of a Checkpointer, its size and its free bytes."""

from __future__ import annotations

import errno
import mmap
import time

import numpy as np

from iobench import linux
from iobench.environment.memory import available_bytes
from iobench.errors import OptionError, UnavailableError
from iobench.remote.address_range import AddressRange
from iobench.remote.backing import backing_of
from iobench.remote.memory import Memory
from iobench.remote.memory_slot import SlotPart
from iobench.units import MIB

__all__ = ["MemoryTier"]

_NO_ROOM = (errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EAGAIN)
_PROBE, _PROBED_PART = 64 * MIB, 16


class MemoryTier:
    """The memory that `options` describe. Raises OptionError when it does not exist here.

    Of `sharers` processes of this node that use it, each has an equal share of its size and of what
    is free.
    """

    def __init__(
        self,
        options: Memory,
        *,
        sharers: int = 1,
    ) -> None:
        self.name, self._sharers = str(options), sharers
        self.backing = backing_of(options)
        self.unit = self.backing.unit
        share = options.size_bytes // sharers
        self.size_bytes = share - share % self.unit
        if not self.size_bytes:
            least = self.unit * sharers
            raise OptionError(f"{self.name}: size must be at least {least} bytes there")
        self.is_special = options.node is not None or options.path is not None
        """Whether it may be refused, and has another speed than other memory of the process."""

    def room_bytes(self, taken_bytes: int, missing_bytes: int) -> int:
        """Return the bytes that its size and its own limits leave.

        `taken_bytes` of it are mapped; `missing_bytes` of these have no pages yet.
        """
        left = self.size_bytes - taken_bytes
        free = self.backing.free_bytes()
        if free is not None:
            left = min(left, free // self._sharers - missing_bytes)
        return max(0, left)

    def map_part(self, room: AddressRange, offset: int, length: int) -> SlotPart | None:
        """Give `room` memory from `offset` on; None when there is none left.

        Raises UnavailableError when the system refuses it for another reason.
        """
        try:
            after = self.backing.map_at(room.address + offset, length)
        except OSError as error:
            if error.errno in _NO_ROOM:
                return None
            raise UnavailableError(
                self.name, f"it cannot be mapped: {error.strerror}.", "Use another memory tier."
            ) from error
        if after is not None:
            room.afterwards.append(after)
        return SlotPart(
            tier=self.name,
            size_bytes=length,
            last_address=room.address + offset + length - 1,
            lazy=self.backing.lazy,
        )

    def probe(self, size_bytes: int = _PROBE) -> float | None:
        """Return the bytes per second of a copy into it by one thread; None without room for it.

        Of memory that is scarce, a part is copied. Raises UnavailableError when the system refuses
        the memory.
        """
        size = min(size_bytes, self.size_bytes, (available_bytes() or size_bytes) // _PROBED_PART)
        size -= size % self.unit
        if not 0 < size <= self.room_bytes(0, 0):
            return None
        room = AddressRange(size, max(self.unit, mmap.PAGESIZE))
        if self.map_part(room, 0, size) is None:
            return None
        target, source = room.array(), np.ones(size, dtype=np.uint8)
        np.copyto(target, source)  # makes the pages
        began_s = time.perf_counter()
        np.copyto(target, source)
        return size / max(time.perf_counter() - began_s, 1e-9)

    def close(self) -> None:
        """Release the device."""
        self.backing.close()


def alignment(tiers: list[MemoryTier]) -> int:
    """Return the unit in which a slot may be spread over `tiers`."""
    return max(linux.PAGE, *(tier.unit for tier in tiers))
