"""SlowWriter: storage that is no faster than a rate, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from iobench.writers.buffered import BufferedWriter
from iobench.writers.image import FileImage
from iobench.writers.rate_limit import RateLimit
from iobench.writers.transfer import Transfer

__all__ = ["SlowWriter"]


class SlowWriter(BufferedWriter):
    """Writes files at no more than `rate_bytes_per_s`, each on its own; reads are not slower."""

    def __init__(self, rate_bytes_per_s: int) -> None:
        super().__init__()
        self._rate = rate_bytes_per_s

    def write_many(
        self, images: Iterable[FileImage], target: str | Path, **options: Any
    ) -> Transfer:
        paced = (RateLimit(self._rate).limited(one) for one in images)
        return super().write_many(paced, target, **options)
