"""A terminal for the tests of reports."""

import io
import re


class Terminal(io.StringIO):
    """A stream that reports to be a terminal."""

    def isatty(self) -> bool:
        return True


def without_styles(shown: str) -> str:
    """Return `shown` without the escape sequences for bold, dim and coloured text."""
    return re.sub(r"\x1b\[[0-9;]*m", "", shown)
