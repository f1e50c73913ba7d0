"""The parts of a run over ranks that need no other process: release, counters, page caches."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from iobench.bench.counters.monitor import Counted, over_machines
from iobench.bench.ranks.group import all_true, over_ranks
from iobench.bench.ranks.steps import Lead, wait_until
from iobench.bench.targets.cold import EvictedFiles
from iobench.results.records import DeviceCounts, Interference, Stored


def test_the_wait_ends_at_its_moment() -> None:
    """It sleeps most of the time, reads the clock at the end, and never ends early."""
    now = [100.0]
    slept = []

    def clock() -> float:
        now[0] += 0.0001
        return now[0]

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    late_s = wait_until(102.0, clock, sleep)
    assert now[0] >= 102.0
    assert 0 <= late_s <= 0.0002
    assert sum(slept) == pytest.approx(2, abs=0.01)


def test_a_moment_that_has_passed_is_told() -> None:
    """The rank begins at once, and says how late it is."""
    assert wait_until(100.0, itertools.repeat(100.5).__next__) == 0.5


def test_the_lead_grows_after_a_late_rank() -> None:
    """By as much as it was late, and not without end."""
    lead = Lead(seconds=0.02)
    lead.began(0.001)
    assert lead.seconds == 0.02
    lead.began(0.1)
    assert lead.seconds == pytest.approx(0.14)
    for _ in range(20):
        lead.began(1.0)
    assert lead.seconds == lead.longest_s


COUNTED = Counted(
    began_s=1.0,
    elapsed_s=2.0,
    cpu_s=1.5,
    system_cpu_s=2.0,
    device=DeviceCounts(
        read_bytes=10, write_bytes=100, process_read_bytes=20, process_write_bytes=300
    ),
    interference=Interference(
        steal_s=0.1, memory_stall_s=None, foreign_read_bytes=0, foreign_write_bytes=0
    ),
)
NODE = replace(
    COUNTED,
    system_cpu_s=3.0,
    device=DeviceCounts(
        read_bytes=5, write_bytes=250, process_read_bytes=5, process_write_bytes=250
    ),
    interference=replace(COUNTED.interference, steal_s=0.2, memory_stall_s=0.5),
)


def test_the_counters_of_all_machines_are_added() -> None:
    """Bytes of others are those of all devices less those of all processes."""
    total = over_machines(COUNTED, [NODE, NODE])
    assert (total.device.read_bytes, total.device.write_bytes) == (20, 600)
    assert (total.device.process_read_bytes, total.device.process_write_bytes) == (20, 300)
    assert total.system_cpu_s == 8.0
    assert total.interference.steal_s == pytest.approx(0.5)
    assert total.interference.memory_stall_s is None  # rank 0's machine does not count it
    assert total.interference.foreign_write_bytes == 300
    assert (total.cpu_s, total.elapsed_s) == (1.5, 2.0)
    assert over_machines(COUNTED, []) is COUNTED


def test_a_machine_without_the_device_hides_all_devices() -> None:
    """A part of the devices cannot show that all bytes arrived."""
    total = over_machines(
        COUNTED,
        [NODE, replace(NODE, device=replace(NODE.device, read_bytes=None, write_bytes=None))],
    )
    assert (total.device.read_bytes, total.device.write_bytes) == (None, None)
    assert total.interference.foreign_write_bytes is None
    assert total.device.process_write_bytes == 300


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [
        (0, [0, 0], 0),
        (0, [4096, None], 4096),  # None: a bucket, or no machine of its own
        (4096, [0], 4096),
    ],
)
def test_dirty_pages_of_every_machine_count(
    own: int, others: list[int | None], expected: int
) -> None:
    """A rank that did not sync is found on its own machine only."""
    stored = Stored(problems=("x",), unsynced_bytes=own)
    found = [None if one is None else Stored(problems=(), unsynced_bytes=one) for one in others]
    total = over_ranks(stored, found)
    assert (total.unsynced_bytes, total.problems, total.unseen) == (expected, ("x",), "")


def test_a_machine_that_cannot_count_is_named() -> None:
    """Without dirty pages elsewhere the sum is unknown; with some it is known to be too much."""
    blind = Stored(problems=(), unsynced_bytes=None, unseen="FUSE shows none")
    clean = Stored(problems=(), unsynced_bytes=0)
    assert over_ranks(clean, [blind]) == replace(clean, unsynced_bytes=None, unseen=blind.unseen)
    assert over_ranks(replace(clean, unsynced_bytes=1), [blind]).unsynced_bytes == 1


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], True), ([True, True], True), ([True, None], None), ([None, False], False)],
)
def test_flushes_of_all_machines(values: list[bool | None], expected: bool | None) -> None:
    """One device that did not flush is enough; one that does not count leaves it open."""
    assert all_true(values) is expected


def test_what_stays_in_any_page_cache_counts() -> None:
    """As a part of the bytes that all ranks restore, each on its own machine."""

    def part(resident: int, size: int, method: str = "cachestat") -> EvictedFiles:
        return EvictedFiles(
            resident_bytes=resident, size_bytes=size, method=method, dropped_caches=False
        )

    cold = EvictedFiles.cold([part(0, 900), part(50, 100), part(0, 0, "")])
    assert (cold.resident_bytes, cold.resident_fraction) == (50, 0.05)
    assert cold.method == "cachestat"
    assert EvictedFiles.cold([part(0, 0, "")]).resident_fraction == 0.0
