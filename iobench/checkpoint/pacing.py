"""PacedImage: a file image that limits the rate at which a writer reads it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from iobench.writers.image import Bytes, FileImage

__all__ = ["PacedImage"]


@dataclass(frozen=True, kw_only=True)
class PacedImage(FileImage):
    """Returns the bytes up to `stop` no earlier than `stop / rate` seconds after its creation.

    Writers take blocks in order and write them afterwards. So no I/O path is faster than
    `rate_bytes_per_s` on average. Within one block the rate may be higher.
    """

    rate_bytes_per_s: float
    began_s: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    @classmethod
    def over(cls, image: FileImage, rate_bytes_per_s: float) -> PacedImage:
        """Return `image`, paced from now on."""
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
