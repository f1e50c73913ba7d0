"""Text of untrusted files: strict parsing, and printing without effects on the terminal."""

from __future__ import annotations

import json
import re
from typing import Any

# C0 and C1 controls command a terminal; line separators and bidirectional controls reorder its
# text; a lone surrogate cannot be encoded. `str.isprintable` also rejects spaces and joiners that
# some languages need in names: those stay.
_COMMANDS = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    r"""Return `text` on one line with control characters escaped, such as `\x1b` and `\n`."""
    if text.isprintable():
        return text
    return _COMMANDS.sub(lambda found: ascii(found[0])[1:-1], text)


def one_line(error: BaseException) -> str:
    """Return the type and the message of `error` on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def printable_values(value: Any) -> Any:
    """Return the JSON value with every string made `printable`, keys included."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(name): printable_values(one) for name, one in value.items()}
    if isinstance(value, list):
        return [printable_values(one) for one in value]
    return value


def parse_json(data: bytes) -> Any:
    """Parse JSON strictly: UTF-8 only, no lone surrogates.

    `json.loads` also accepts UTF-16, UTF-32 and lone surrogates, which cannot be encoded again.
    Raises ValueError, and RecursionError for values nested too deep.
    """
    text = data.decode("utf-8")
    document = json.loads(text)
    if "\\" in text:  # UTF-8 cannot encode a surrogate, but an escape can
        json.dumps(document, ensure_ascii=False).encode("utf-8")
    return document
