"""Clock: the counters of one timed operation, from the moment at which its jobs begin."""

from __future__ import annotations

from collections.abc import Sequence

from iobench.bench.counters.monitor import Counted, Counters, Monitor
from iobench.bench.counters.sampler import Sampler
from iobench.bench.processes.job import Done
from iobench.results import utc_now

__all__ = ["Clock"]


class Clock:
    """Starts at the first call of `start`; later calls change nothing."""

    counters: Counters
    started_at: str

    def __init__(self, monitor: Monitor, sampler: Sampler | None) -> None:
        self._monitor, self._sampler = monitor, sampler
        self._started = False

    def start(self, began_s: float | None) -> None:
        """Start now, or at `began_s` of time.perf_counter, which is soon."""
        if not self._started:
            self._started, self.started_at = True, utc_now()
            self.counters = Counters(self._monitor, self._sampler, began_s)

    def stop(self, done: Sequence[Done], ended_s: float | None = None) -> Counted:
        """Return the growth of all counters of this machine, with the usage of other processes.

        `ended_s` is the moment at which the clock ends, if that was before this call.
        """
        usages = [one.usage for one in done if one.usage is not None]
        return self.counters.stop(usages, ended_s)
