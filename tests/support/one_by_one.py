"""OneByOne: a writer whose files all pass through `write`, for tests that change it."""

from __future__ import annotations

from typing import Any

from iobench.writers.base import Writer
from iobench.writers.buffered import BufferedWriter
from iobench.writers.transfer import Transfer

__all__ = ["OneByOne"]


class OneByOne(BufferedWriter):
    """`buffered` without a `write_many` of its own."""

    def write_many(self, *given: Any, **how: Any) -> Transfer:
        return Writer.write_many(self, *given, **how)
