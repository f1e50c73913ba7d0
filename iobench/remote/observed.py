"""ObservedRates: what was measured of both tiers, and the tier chosen last."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from iobench.remote.journal import DrainEvent
from iobench.remote.placement import TierHistory
from iobench.remote.rates import Estimate, Observation, estimate

__all__ = ["LOCAL", "REMOTE", "ObservedRates"]

LOCAL, REMOTE = "local", "remote"
"""Names of the tiers in a history."""

_KEPT = 32


class ObservedRates:
    """The last 32 transfers to each tier. Any thread may add one. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._seen = {name: deque[Observation](maxlen=_KEPT) for name in (LOCAL, REMOTE)}
        self._current, self._since_s = "", 0.0

    def add(
        self,
        tier: str,
        size_bytes: int,
        elapsed_s: float,
        *,
        ok: bool = True,
        at_s: float | None = None,
    ) -> None:
        """Record a transfer that ended at `at_s`, or now; not `ok`: it failed."""
        one = Observation(
            tier=tier,
            at_s=self._clock() if at_s is None else at_s,
            size_bytes=size_bytes,
            elapsed_s=elapsed_s,
            ok=ok,
        )
        with self._lock:
            self._seen[tier].append(one)

    def recall(self, events: Iterable[DrainEvent]) -> None:
        """Begin with the rates in a journal."""
        offset_s = self._clock() - time.time()
        for one in events:
            tier, size = {
                "saved": (LOCAL, one.size_bytes),
                "durable": (REMOTE, one.sent_bytes),
            }.get(one.event, ("", 0))
            if size and one.elapsed_s > 0:  # the clock may have been set back
                at_s = min(one.at_s + offset_s, self._clock())
                self.add(tier, size, one.elapsed_s, at_s=at_s)

    def estimate(self, tier: str) -> Estimate | None:
        """Return the estimate of a tier; None without a transfer since its last failure."""
        with self._lock:
            return estimate(list(self._seen[tier]))

    def history(self) -> TierHistory:
        """Return everything for `choose`."""
        with self._lock:
            merged = sorted(
                (one for seen in self._seen.values() for one in seen), key=lambda one: one.at_s
            )
            return TierHistory(
                observations=tuple(merged), current=self._current, since_s=self._since_s
            )

    def chosen(self, tier: str) -> None:
        """Record a decision."""
        with self._lock:
            if tier != self._current:
                self._current, self._since_s = tier, self._clock()
