"""Lease: one piece of work of a Channel, on some memory."""

from __future__ import annotations

from enum import Enum
from typing import Generic, TypeVar

from iobench.writers.blocks.interrupt_safe import Worker

__all__ = ["Lease", "LeaseState"]

T = TypeVar("T")


class LeaseState(Enum):
    """The states of a lease, in order; it ends in one of the last three."""

    HELD = "held"
    """Owned by its maker, also while it is reserved."""
    QUEUED = "queued"
    """Submitted; no worker has begun it."""
    RUNNING = "running"
    """Owned by a worker."""
    DONE = "done"
    FAILED = "failed"
    LOST = "lost"
    """The worker ended before its work; the memory is never released."""


class Lease(Generic[T]):
    """One piece of work. When `submit` raises, the caller owns the lease if it is HELD."""

    __slots__ = ("item", "state", "worker")

    def __init__(self, item: T) -> None:
        self.item, self.state = item, LeaseState.HELD
        self.worker: Worker | None = None
