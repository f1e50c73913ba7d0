"""The pool's windows and its bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iobench import linux
from iobench.bench.data import pool as module
from iobench.bench.data.pool import RandomPool, Windows
from iobench.units import KIB, MIB

POOL = RandomPool(64 * KIB, 300 * KIB, seed=1)
SIZES = st.lists(st.integers(1, 70 * KIB), min_size=1, max_size=60)


@given(SIZES)
def test_windows_of_one_lap_do_not_overlap(sizes: list[int]) -> None:
    """Each window begins behind the one before, and none reaches the first one again."""
    windows = Windows(POOL.size_bytes)
    last_lap, first, end = -1, 0, 0
    for size in sizes:
        window = windows.take(size)
        begin = window.start
        assert window.stop - begin == size
        assert window.lap in (last_lap, last_lap + 1)
        if window.lap != last_lap:
            last_lap, first, end = window.lap, begin, begin
        assert begin >= end
        end = begin + size
        assert end - first <= max(POOL.size_bytes, size)


@given(SIZES)
def test_windows_are_aligned_as_tensors_are(sizes: list[int]) -> None:
    """Each address is a multiple of 64 and none of 512: direct I/O cannot use it without a copy."""
    windows = Windows(POOL.size_bytes)
    for size in sizes:
        address = POOL.memory[windows.take(size).start :].ctypes.data
        assert address % 64 == 0
        assert address % 512 != 0


def test_laps_are_shifted() -> None:
    """In 224 laps, no two give their windows the same distance from a page; none is aligned."""
    windows = Windows(POOL.size_bytes)
    found = set()
    for lap in range(224):
        taken = [windows.take(24 * KIB) for _ in range(2)]
        assert {window.lap for window in taken} == {lap}
        assert len({window.start % linux.PAGE for window in taken}) == 1
        assert all(window.start % 16 == 0 and window.start % 512 for window in taken)
        found.add(taken[0].start % linux.PAGE)
    assert len(found) == 224


def test_one_lap_is_enough_when_the_pool_is_as_large_as_needed() -> None:
    """`needed_bytes` is enough for all windows in one lap, whatever their sizes."""
    sizes = [0, 1, 63, 64, 65, 511, 512, 513, 4096, 100_000] * 3
    pool = RandomPool(Windows.needed_bytes(sizes), max(sizes), seed=1)
    windows = Windows(pool.size_bytes)
    assert {windows.take(size).lap for size in sizes} == {0}
    assert len(pool.memory) == pool.size_bytes


def test_a_window_longer_than_the_pool() -> None:
    """It repeats the pool's bytes, and takes no more memory than the pool."""
    pool = RandomPool(64 * KIB, 10 * MIB, seed=1)
    pool.refill()
    size = pool.size_bytes
    start, stop, _ = Windows(size).take(10 * MIB)
    memory = pool.memory[start:stop]
    assert len(memory) == 10 * MIB
    assert np.array_equal(memory[:size], memory[size : 2 * size])
    memory[5] ^= 0xFF
    assert memory[5] == memory[5 + size] == memory[5 + 9 * size]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_refill_gives_other_bytes(threads: int) -> None:
    """Each filling is random and differs from the one before."""
    pool = RandomPool(5 * MIB, 0, seed=1)
    fillings = []
    for _ in range(2):
        pool.refill(threads)
        fillings.append(pool.memory.view(np.uint64).copy())
    words = np.concatenate(fillings)
    words.sort()
    assert (words[1:] != words[:-1]).all()


def test_renewed_bytes_are_new_and_random() -> None:
    """No word of 8 bytes comes twice, neither in one renewal nor in different ones.

    Bytes that are not random any more, as a restore may leave them, are not used again.
    """
    pool = RandomPool(MIB, 0, seed=1)
    renewals = []
    for intact in (False, True, True, False, True):
        if not intact:
            pool.memory[:] = 0
            pool.intact = False
        pool.renew()
        assert pool.intact
        renewals.append(pool.memory.view(np.uint64).copy())
    words = np.concatenate(renewals)
    words.sort()
    assert (words[1:] != words[:-1]).all()


def test_a_seed_repeats_its_bytes() -> None:
    """The same seed gives the same fillings, another seed others."""
    one, two, other = (RandomPool(64 * KIB, 0, seed=seed) for seed in (1, 1, 2))
    for pool in (one, two, other):
        pool.refill()
    assert np.array_equal(one.memory, two.memory)
    assert not np.array_equal(one.memory, other.memory)


Impatience = Callable[[threading.Event], AbstractContextManager[None]]


def test_impatience_while_it_is_filled(
    impatience: Impatience, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C is raised after every thread has filled its part of the pool."""
    go_on, generator = threading.Event(), np.random.SFC64

    def slow(seed: np.random.SeedSequence) -> np.random.SFC64:
        go_on.wait(10)
        return generator(seed)

    monkeypatch.setattr(np.random, "SFC64", slow)
    pool = RandomPool(64 * KIB, 0, seed=1)
    with impatience(go_on):
        pool.refill()
    assert pool.memory.view(np.uint64).all()


def test_impatience_while_it_is_trimmed(
    impatience: Impatience, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C is raised after the trimming thread has ended."""
    go_on, trimming = threading.Event(), threading.Event()

    def slow(_: RandomPool) -> None:
        trimming.set()
        go_on.wait(10)

    monkeypatch.setattr(RandomPool, "trim", slow)
    with impatience(go_on), RandomPool(64 * KIB, 10 * MIB, seed=1).trimmed():
        assert trimming.wait(10)
    assert "iobench-trimmer" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("part", [8 * KIB, 40 * KIB, MIB])
def test_scrub_changes_every_byte(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No byte keeps its value, also in a second call, in one part or several."""
    monkeypatch.setattr(module, "_SCRUBBED", part)
    pool = RandomPool(64 * KIB, 0, seed=1)
    pool.refill()
    for _ in range(3):
        before = pool.memory.copy()
        pool.scrub()
        assert (pool.memory != before).all()


def test_processes_that_save_the_same_bytes() -> None:
    """One that took no part in earlier checkpoints has the same; no two checkpoints have."""
    one, other = (RandomPool(64 * 1024, 0, 7) for _ in range(2))
    seen = set[bytes]()
    for numbers in ((0, 0), (0, 1), (1, 0)):
        one.renew()
        seen.add(one.memory.tobytes())
        one.renew(numbers)
        other.renew(numbers)
        assert one.memory.tobytes() == other.memory.tobytes()
        seen.add(one.memory.tobytes())
    assert len(seen) == 6
