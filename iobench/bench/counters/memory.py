"""OperationMemory: what one save or restore takes of this process's memory."""

from __future__ import annotations

from typing import Protocol

from iobench import linux
from iobench.environment.memory import peak_bytes, private_bytes, reset_peak


class Keeper(Protocol):
    """Something that keeps memory between its operations, such as a writer's staging blocks."""

    kept_bytes: int
    """Memory that its earlier operations took and did not return."""
    maps_files: bool
    """Whether a restore of it maps the files."""


class OperationMemory:
    """Measures one operation after the other, all outside their clocks.

    `settle`, prepare the operation, `begin`, the operation with its clock, `used`. The operations
    of several keepers may alternate. What one leaves is known at the next `settle`, and counts as
    memory of its own later operations: they use it again.
    """

    def __init__(self) -> None:
        self._keeper: Keeper | None = None
        self._resident: int | None = None
        self._private: int | None = None

    def settle(self) -> None:
        """Return freed memory to the system, and note what the last operation kept."""
        linux.trim_heap()
        now, keeper = private_bytes(), self._keeper
        if keeper is not None and now is not None and self._private is not None:
            keeper.kept_bytes = max(0, keeper.kept_bytes + now - self._private)
        self._keeper = None

    def begin(self) -> None:
        """Call it right before the operation."""
        self._resident, self._private = reset_peak(), private_bytes()

    def used(self, keeper: Keeper, results_bytes: int = 0) -> int | None:
        """Return the most memory that the operation of `keeper` used; None if unknown.

        Without `results_bytes`: tensors that it made, and that still exist. A mapped file would
        count as resident memory and as page cache. So memory of an operation that maps files is
        that at its end, without the mapped pages.
        """
        self._keeper = keeper
        before = self._private if keeper.maps_files else self._resident
        peak = private_bytes() if keeper.maps_files else peak_bytes()
        if before is None or peak is None:
            return None
        return keeper.kept_bytes + max(0, peak - before - results_bytes)
