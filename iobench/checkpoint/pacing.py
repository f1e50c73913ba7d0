"""PacedImage: a file image that limits the rate at which a writer reads it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

from iobench.writers.image import AnyMemory, FileImage
from iobench.writers.wrapped_image import WrappedImage

__all__ = ["PacedImage"]


class PacedImage(WrappedImage):
    """Returns the bytes up to `stop` no earlier than `stop / rate` seconds after its creation.

    Writers take blocks in order and write them afterwards. So no I/O path is faster than
    the rate on average. Within one block the rate may be higher.
    """

    _rate_bytes_per_s: float
    _began_s: float
    _clock: Callable[[], float]
    _sleep: Callable[[float], None]

    @classmethod
    def over(
        cls,
        image: FileImage,
        rate_bytes_per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Self:
        """Return `image`, paced from now on."""
        rate = rate_bytes_per_s
        return cls(image, _rate_bytes_per_s=rate, _began_s=clock(), _clock=clock, _sleep=sleep)

    def pieces(self, start: int, stop: int) -> list[AnyMemory]:
        early_s = self._began_s + stop / self._rate_bytes_per_s - self._clock()
        if early_s > 0:
            self._sleep(early_s)
        return super().pieces(start, stop)
