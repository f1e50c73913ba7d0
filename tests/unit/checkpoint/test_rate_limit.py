"""RateLimit: the rate of all threads together, saves first, and the end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iobench.checkpoint.rate_limit import RateLimit, StoppedError
from iobench.writers.buffered import BufferedWriter
from iobench.writers.image import FileImage


class _Clock:
    """Time that passes by waits alone."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> bool:
        self.now_s += seconds
        return False


def _limit(rate: float | None, busy: list[bool], monkeypatch: pytest.MonkeyPatch) -> RateLimit:
    clock = _Clock()
    limit = RateLimit(rate, lambda: busy.pop(0) if busy else False, clock=clock)
    monkeypatch.setattr(limit.stop, "wait", clock.wait)
    return limit


def test_time_of_the_transfer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks as slow as the rate need not wait; time without a copy gives nothing."""
    limit = _limit(1000, [], monkeypatch)
    limit.begin()
    began = []
    for _ in range(3):
        limit.wait(500)
        began.append(limit._clock() - 100.0)
        limit.stop.wait(0.5)  # the transfer
    assert began == pytest.approx([0.5, 1.0, 1.5])
    limit.stop.wait(100.0)
    limit.begin()
    begin_s = limit._clock()
    limit.wait(500)
    assert limit._clock() - begin_s == pytest.approx(0.5)


def test_a_save_in_the_middle_of_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy pauses: its time is that without the save, and that of the save."""
    limit = _limit(1000, [False, True, True, True], monkeypatch)
    limit.begin()
    limit.wait(500)
    assert limit._clock() - 100.0 == pytest.approx(0.56)
    assert limit.yielded_s == pytest.approx(0.06)
    limit.wait(500)
    assert limit._clock() - 100.0 == pytest.approx(1.06)


def test_a_pause_is_no_pause_while_a_block_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a copy without its pauses has all of the time in which it moved something."""
    limit = _limit(None, [False, True, True, False, True], monkeypatch)
    with limit.moving(500), limit.moving(500):  # the second one waits during the first one
        pass
    assert limit.yielded_s == 0.0
    with limit.moving(500):
        pass
    assert limit.yielded_s == pytest.approx(0.02)


def test_no_block_begins_while_a_save_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of the wait is counted: such a copy says nothing about the rate."""
    limit = _limit(None, [True, True, True, False], monkeypatch)
    limit.wait(500)
    assert limit.yielded_s == pytest.approx(0.06)
    limit.wait(500)
    assert limit.yielded_s == pytest.approx(0.06)


def test_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also during a save."""
    limit = _limit(None, [True] * 1000, monkeypatch)
    limit.stop.set()
    with pytest.raises(StoppedError):
        limit.wait(1)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=20), st.floats(1e6, 1e9))
def test_it_keeps_the_rate(sizes: list[int], rate: float) -> None:
    """Over any time, no more passes than the rate gives, and one block."""
    with pytest.MonkeyPatch.context() as patch:
        limit = _limit(rate, [], patch)
        for size in sizes:
            limit.wait(size)
        assert limit._clock() - 100.0 == pytest.approx(sum(sizes) / rate, abs=1e-6)


def test_no_rate_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """None lets everything pass, in any size."""
    limit = _limit(None, [], monkeypatch)
    limit.wait(10**15)
    assert limit._clock() == 100.0


def test_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte is available when the rate permits it; a repeated request takes no time."""
    limit = _limit(10, [], monkeypatch)
    image = limit.limited(FileImage.of("file", [np.arange(100, dtype=np.uint8)]))
    image.views(0, 20)
    assert limit._clock() == pytest.approx(102)
    image.views(0, 20)
    assert limit._clock() == pytest.approx(102)
    limit.stop.wait(3)
    image.views(20, 50)
    assert limit._clock() == pytest.approx(105)
    block = np.zeros(50, dtype=np.uint8)
    assert image.gather(50, 100, block) == 50
    assert limit._clock() == pytest.approx(110)
    assert (block == np.arange(50, 100)).all()


def test_writers_take_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer writes it like any image, no sooner than the rate permits."""
    limit = _limit(25, [], monkeypatch)
    image = limit.limited(FileImage.of("file", [np.arange(100, dtype=np.uint8)]))
    BufferedWriter(block_size="4KiB").write(image, tmp_path)
    assert limit._clock() == pytest.approx(104)
    assert (tmp_path / "file").read_bytes() == bytes(range(100))
