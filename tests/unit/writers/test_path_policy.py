"""PathPolicy: the choice in each situation. MemoryPressure: what it reads, and how rarely."""

from __future__ import annotations

from pathlib import Path

import pytest

from iobench.units import GIB, KIB, MIB
from iobench.writers.direct.policy import (
    Decision,
    IoPath,
    MemoryPressure,
    PathPolicy,
    Pressure,
)

_SMALL = 256 * KIB
_BLOCK = 8 * MIB
_FREE = Pressure(total_bytes=64 * GIB, available_bytes=32 * GIB)
_SHORT = Pressure(total_bytes=64 * GIB, available_bytes=GIB)
_DIRTY = Pressure(
    total_bytes=64 * GIB, available_bytes=32 * GIB, dirty_bytes=6 * GIB, throttle_bytes=5 * GIB
)
_ALL = tuple(IoPath)


_SITUATIONS: list[tuple[int, dict[str, bool], Pressure, str, str]] = [
    (_SMALL - 1, {}, _FREE, "buffered", "small"),
    (_SMALL - 1, {}, _SHORT, "uncached", "small, memory is short"),
    (1, {}, _DIRTY, "uncached", "small, much is dirty"),
    (_SMALL, {}, _FREE, "direct", "large"),
    (_BLOCK, {}, _SHORT, "direct", "large"),
    (_BLOCK, {"aligned": False}, _FREE, "uncached", "unaligned"),
    (_BLOCK, {"aligned": False}, _DIRTY, "uncached", "unaligned"),
    (_BLOCK, {"in_cache": True}, _FREE, "buffered", "in the page cache"),
    (100, {"in_cache": True}, _SHORT, "buffered", "in the page cache"),
]


@pytest.mark.parametrize(("size", "how", "pressure", "path", "reason"), _SITUATIONS)
def test_situations(
    size: int, how: dict[str, bool], pressure: Pressure, path: str, reason: str
) -> None:
    """If all paths are available, each situation has one path and one reason."""
    chosen = PathPolicy(small_size=_SMALL).choose(size, pressure, **how)
    assert chosen == Decision(path=IoPath(path), reason=reason)


@pytest.mark.parametrize(
    ("pressure", "path", "reason"),
    [
        (_FREE, "buffered", "read soon"),
        (_SHORT, "direct", "large, memory is short"),
        (_DIRTY, "direct", "large, much is dirty"),
    ],
)
def test_read_soon(pressure: Pressure, path: str, reason: str) -> None:
    """Files that are read soon stay in memory, unless it is short or too much is dirty."""
    chosen = PathPolicy(small_size=_SMALL, read_soon=True).choose(_BLOCK, pressure)
    assert chosen == Decision(path=IoPath(path), reason=reason)


@pytest.mark.parametrize(
    ("paths", "size", "aligned", "pressure", "path"),
    [
        (("direct", "buffered"), _BLOCK, True, _FREE, "direct"),
        (("direct", "buffered"), _BLOCK, False, _FREE, "buffered"),
        (("direct", "buffered"), 100, True, _SHORT, "buffered"),
        (("uncached", "buffered"), _BLOCK, True, _FREE, "uncached"),
        (("buffered",), _BLOCK, True, _SHORT, "buffered"),
        (("uncached",), 100, True, _FREE, "uncached"),
        (("direct",), 100, True, _FREE, "direct"),
    ],
)
def test_fewer_paths(
    paths: tuple[str, ...], size: int, aligned: bool, pressure: Pressure, path: str
) -> None:
    """If a path is missing, the next best allowed one is chosen."""
    policy = PathPolicy([IoPath(one) for one in paths], small_size=_SMALL)
    assert policy.choose(size, pressure, aligned=aligned).path == path


def test_dropped_paths() -> None:
    """A path that is dropped is not chosen again, and the last one cannot be dropped."""
    policy = PathPolicy(small_size=_SMALL)
    policy.drop(IoPath.DIRECT)
    assert policy.choose(_BLOCK) == Decision(path=IoPath.UNCACHED, reason="large")
    for dropped in (IoPath.UNCACHED, IoPath.BUFFERED):
        policy.drop(dropped)
        assert policy.choose(_BLOCK).path == IoPath.BUFFERED


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
