"""The messages between the hub and the ranks: JSON with its length in front."""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from typing import Any

__all__ = ["PREFIX", "Message", "length_of", "pack", "proof", "unpack"]

Message = dict[str, Any]

PREFIX = struct.Struct("!I")
"""Bytes of a message, in front of it."""

_MOST_BYTES = 1 << 30  # of a message of a rank
_MOST_HELLO_BYTES = 4096  # nothing is known yet of who sends it


def pack(message: Message) -> bytes:
    """Return the message with its length. Raises TypeError for a value that JSON does not have."""
    text = json.dumps(message, separators=(",", ":")).encode()
    return PREFIX.pack(len(text)) + text


def length_of(prefix: bytes, *, hello: bool = False) -> int:
    """Return the length that follows. Raises ConnectionError for one that no rank sends.

    `hello`: the other end has not proven yet that it is one.
    """
    (length,) = PREFIX.unpack(prefix)
    if length > (_MOST_HELLO_BYTES if hello else _MOST_BYTES):
        raise ConnectionError(f"a message of {length} bytes: this is no rank of the job")
    return int(length)


def unpack(text: bytes) -> Message:
    """Return the message. Raises ConnectionError for one that is not a message."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConnectionError("not a message of a rank") from error
    if not isinstance(message, dict):
        raise ConnectionError("not a message of a rank")
    return message


def proof(token: str, nonce: str, who: str) -> str:
    """Return what only a holder of `token` can compute from `nonce`."""
    return hmac.new(token.encode(), f"{who}:{nonce}".encode(), hashlib.sha256).hexdigest()
