"""The messages between the hub and the ranks: JSON with its length in front.

The values of the ranks follow the JSON of a message in a line of their own. So the hub passes them
on without a look into them.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from typing import Any

__all__ = [
    "EVERY_RANK",
    "PREFIX",
    "Message",
    "json_bytes",
    "length_of",
    "pack",
    "proof",
    "split",
    "suspended_s",
    "unpack",
]

Message = dict[str, Any]

EVERY_RANK = "construct the Checkpointer in every rank, or pass world='alone'"
"""What to do about ranks that never connect."""

PREFIX = struct.Struct("!Q")
"""Bytes of a message, in front of it."""

_MOST_HELLO_BYTES = 4096  # nothing is known yet of who sends it


def pack(message: Message, values: bytes | None = None) -> bytes:
    """Return the message and `values` with their length.

    Raises TypeError for a message that has more than JSON.
    """
    text = json_bytes(message)
    if values is None:
        return PREFIX.pack(len(text)) + text
    return b"".join((PREFIX.pack(len(text) + 1 + len(values)), text, b"\n", values))


def json_bytes(value: Any) -> bytes:
    """Return `value` as JSON in one line. Raises TypeError for more than JSON.

    Not by msgspec: it refuses names of files that are not UTF-8, and makes None of infinity.
    """
    return json.dumps(value, separators=(",", ":")).encode()


def length_of(prefix: bytes, *, hello: bool = False) -> int:
    """Return the length that follows.

    `hello`: the other end has not proven yet that it is a rank of the job. Raises ConnectionError
    for a length that no rank sends then.
    """
    (length,) = PREFIX.unpack(prefix)
    if hello and length > _MOST_HELLO_BYTES:
        raise ConnectionError(f"a message of {length} bytes: this is not a rank of the job")
    return int(length)


def split(text: bytes) -> tuple[Message, bytes]:
    """Return the message and the values after it. Raises ConnectionError like `unpack`."""
    message, _, values = text.partition(b"\n")
    return unpack(message), values


def unpack(text: bytes) -> Message:
    """Return the message. Raises ConnectionError for one that is not a message."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConnectionError("not a message of a rank") from error
    if not isinstance(message, dict):
        raise ConnectionError("not a message of a rank")
    return message


def suspended_s(lost_after_s: float) -> float:
    """Return after how long without work a process was suspended itself (SIGSTOP, a moved VM).

    It then waits longer for the others, whose messages it has not read yet.
    """
    return min(15.0, lost_after_s / 2)


def proof(token: str, nonce: str, who: str) -> str:
    """Return what only a holder of `token` can compute from `nonce`."""
    return hmac.new(token.encode(), f"{who}:{nonce}".encode(), hashlib.sha256).hexdigest()
