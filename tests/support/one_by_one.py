"""OneByOne: a writer whose files all pass through `write`, for tests that change it."""

from typing import Any

from iobench.writers.base import Writer
from iobench.writers.buffered import BufferedWriter
from iobench.writers.transfer import Transfer


class OneByOne(BufferedWriter):
    """`buffered` without a `write_many` and a `read_many` of its own."""

    def write_many(self, *given: Any, **how: Any) -> Transfer:
        return Writer.write_many(self, *given, **how)

    def read_many(self, *given: Any) -> Transfer:
        return Writer.read_many(self, *given)
