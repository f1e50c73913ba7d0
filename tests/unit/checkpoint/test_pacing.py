"""PacedImage: bytes no faster than a rate, on a fake clock."""

from __future__ import annotations

import numpy as np

from iobench.checkpoint.place import PacedImage
from iobench.writers.buffered import BufferedWriter
from iobench.writers.image import FileImage


class _Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def _paced(clock: _Clock, rate: float) -> PacedImage:
    image = FileImage.of("file", [np.arange(100, dtype=np.uint8)])
    return PacedImage.over(image, rate, clock=lambda: clock.now_s, sleep=clock.sleep)


def test_rate() -> None:
    """Each byte is available when the rate permits it; a repeated request takes no time."""
    clock = _Clock()
    image = _paced(clock, 10)
    image.views(0, 20)
    assert clock.now_s == 102
    image.views(0, 20)
    assert clock.now_s == 102
    clock.now_s = 107
    image.views(20, 50)
    assert clock.now_s == 107
    block = np.zeros(50, dtype=np.uint8)
    image.gather(50, 100, block)
    assert clock.now_s == 110
    assert (block == np.arange(50, 100)).all()


def test_writers_take_it(tmp_path) -> None:
    """A writer writes it like any image, no sooner than the rate permits."""
    clock = _Clock()
    BufferedWriter(block_size="4KiB").write(_paced(clock, 25), tmp_path)
    assert clock.now_s == 104
    assert (tmp_path / "file").read_bytes() == bytes(range(100))
