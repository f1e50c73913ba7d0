"""Text from files that anyone may have written: parsed strictly, printed without effects."""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["parse_json", "printable"]

# C0 and C1 controls command a terminal; bidirectional controls reorder what it shows; a lone
# surrogate cannot be encoded at all.
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    r"""`text` on one line, with every character that is not printed as itself escaped: `\x1b`."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


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
