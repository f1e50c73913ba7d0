"""The phases of a transfer add up to its time, also where workers take turns."""

from __future__ import annotations

import time

import pytest

from iobench.writers.blocks.workers import Blocks, run_workers
from iobench.writers.transfer import Meter


def test_workers_have_all_of_their_time_in_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only the work moves, exactly: what a worker does outside of its own phases,
    and its wait for the others, is `threads`."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def work(blocks: Blocks, own: Meter) -> None:
        for _ in blocks:
            with own.phase("write"):
                now[0] += 0.5
            now[0] += 0.25

    meter = Meter()
    run_workers(1, Blocks(0, 4, 1), work, meter)
    assert meter.seconds == {"write": 2.0, "threads": 1.0}
    assert sum(meter.seconds.values()) == now[0] - 100


def test_the_wait_for_the_last_worker_is_in_a_phase() -> None:
    """Of two workers one writes for 3 s and the other for 1 s, which then waits for 2 s."""
    meter = Meter()
    meter.absorb([Meter(seconds={"write": 3.0}), Meter(seconds={"write": 1.0})], 3.0)
    assert meter.seconds == {"write": 2.0, "threads": 1.0}
