"""MemoryPressure: what it reads, what it means, and how rarely it reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from iobench.units import GIB, KIB, MIB
from iobench.writers.direct.policy import MemoryPressure, Pressure


def _proc(root: Path, available_kib: int, dirty_kib: int = 0, **settings: int) -> Path:
    (root / "sys/vm").mkdir(parents=True, exist_ok=True)
    (root / "meminfo").write_text(
        f"MemTotal: {16 * MIB} kB\nMemAvailable: {available_kib} kB\n"
        f"Dirty: {dirty_kib} kB\nWriteback: {dirty_kib} kB\nHugePages_Total: 0\n"
    )
    defaults = {"dirty_bytes": 0, "dirty_ratio": 20}
    defaults |= {"dirty_background_bytes": 0, "dirty_background_ratio": 10}
    for name, value in (defaults | settings).items():
        (root / "sys/vm" / name).write_text(f"{value}\n")
    return root


def test_reads_the_machine(tmp_path: Path) -> None:
    """Dirty and write-back pages are added. Writers are throttled half-way between the two
    limits."""
    found = MemoryPressure(proc=_proc(tmp_path, 10 * MIB, dirty_kib=100)).now()
    assert found == Pressure(
        total_bytes=16 * GIB,
        available_bytes=10 * GIB,
        dirty_bytes=200 * KIB,
        throttle_bytes=(2 * GIB + GIB) // 2,
    )


def test_limits_in_bytes_win(tmp_path: Path) -> None:
    """vm.dirty_bytes and vm.dirty_background_bytes, if set, are the limits."""
    proc = _proc(tmp_path, 10 * MIB, dirty_bytes=300 * MIB, dirty_background_bytes=100 * MIB)
    assert MemoryPressure(proc=proc).now().throttle_bytes == 200 * MIB


@pytest.mark.parametrize(
    ("available", "dirty", "reason"),
    [
        (8 * GIB, 0, ""),
        (GIB, 0, ""),
        (16 * GIB // 20 - 1, 0, "memory is short"),
        (8 * GIB, GIB, ""),
        (8 * GIB, GIB + 1, "much is dirty"),
        (100 * MIB, 2 * GIB, "memory is short"),
    ],
)
def test_what_it_means(available: int, dirty: int, reason: str) -> None:
    """With less than 5% of memory available it is short; above the throttle much is dirty."""
    pressure = Pressure(
        total_bytes=16 * GIB, available_bytes=available, dirty_bytes=dirty, throttle_bytes=GIB
    )
    assert pressure.reason == reason


def test_little_in_all_is_short() -> None:
    """On a small machine at least 256 MiB must be available."""
    small = Pressure(total_bytes=GIB, available_bytes=255 * MIB)
    assert small.reason == "memory is short"


def test_nothing_to_read_is_no_pressure(tmp_path: Path) -> None:
    """Without /proc nothing is known, and the page cache is used."""
    found = MemoryPressure(proc=tmp_path / "nowhere").now()
    assert found == Pressure()
    assert found.reason == ""


def test_reads_at_most_every_interval(tmp_path: Path) -> None:
    """Within the interval the last reading is returned, later a new one."""
    now = [100.0]
    pressure = MemoryPressure(proc=_proc(tmp_path, 10 * MIB), interval_s=0.25, clock=lambda: now[0])
    assert pressure.now().available_bytes == 10 * GIB
    _proc(tmp_path, 5 * MIB)
    now[0] = 100.2
    assert pressure.now().available_bytes == 10 * GIB
    now[0] = 100.25
    assert pressure.now().available_bytes == 5 * GIB


def test_this_machine() -> None:
    """The real /proc gives plausible figures."""
    found = MemoryPressure().now()
    assert 0 < found.available_bytes < found.total_bytes
    assert found.throttle_bytes > 0
