"""PacedImage: a file image that is handed out no faster than a given rate."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from iobench.writers.image import Bytes, FileImage

__all__ = ["PacedImage"]


@dataclass(frozen=True, kw_only=True)
class PacedImage(FileImage):
    """The bytes up to `stop` are given out `stop / rate` seconds after the image was made.

    Writers ask for blocks in order and then write them, so none of them is faster than
    `rate_bytes_per_s`, whatever path it takes; the last block may be on its way all at once.
    """

    rate_bytes_per_s: float
    began_s: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    @classmethod
    def over(cls, image: FileImage, rate_bytes_per_s: float) -> PacedImage:
        """`image`, paced from now on."""
        return cls(
            path=image.path,
            segments=image.segments,
            rate_bytes_per_s=rate_bytes_per_s,
            began_s=time.monotonic(),
        )

    def views(self, start: int, stop: int) -> list[Bytes]:
        early_s = self.began_s + stop / self.rate_bytes_per_s - self.clock()
        if early_s > 0:
            self.sleep(early_s)
        return super().views(start, stop)
