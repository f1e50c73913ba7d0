"""Text from files that anyone may have written: parsed strictly, printed without effects."""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["parse_json", "printable", "printable_values"]


# C0 and C1 controls command a terminal, line separators and bidirectional controls change the order
# of what it shows, a lone surrogate cannot be encoded at all. Other characters that Python calls
# not printable are spaces and joiners of names in some languages.
_COMMANDS = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    r"""`text` on one line, without effect on a terminal: `\x1b`, `\n` and the like are escaped."""
    if text.isprintable():
        return text
    return _COMMANDS.sub(lambda found: ascii(found[0])[1:-1], text)


def printable_values(value: Any) -> Any:
    """The JSON value with all its texts, names too, made `printable`."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(name): printable_values(one) for name, one in value.items()}
    if isinstance(value, list):
        return [printable_values(one) for one in value]
    return value


def parse_json(data: bytes) -> Any:
    """What the JSON in `data` says, as a strict parser reads it.

    `json.loads` also takes UTF-16, UTF-32 and lone surrogates, which no other text can hold.
    Raises ValueError, and RecursionError for what is nested too deep.
    """
    text = data.decode("utf-8")
    document = json.loads(text)
    if "\\" in text:  # the escapes are the only way left to write a surrogate
        json.dumps(document, ensure_ascii=False).encode("utf-8")
    return document
