"""EngineLink: messages between a trainer and its engine process. Nothing is ever unpickled."""

from __future__ import annotations

import errno
import socket
from contextlib import suppress
from typing import Any

from iobench import errors
from iobench.dist.messages import PREFIX, Message, length_of, pack, unpack
from iobench.errors import IobenchError, TransferError

__all__ = ["EngineLink", "described", "raise_described"]


class EngineLink:
    """One end of a socket pair: JSON messages, each with optional bytes after it."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, message: Message, payload: bytes = b"") -> None:
        """Send a message. Raises OSError when the other end is gone."""
        self._socket.sendall(pack({**message, "payload": len(payload)}) + payload)

    def receive(self) -> tuple[Message, bytes] | None:
        """Return the next message with its bytes; None when the other end is gone."""
        prefix = self._exactly(PREFIX.size)
        text = prefix and self._exactly(length_of(prefix))
        if not text:
            return None
        message = unpack(text)
        payload = self._exactly(message.pop("payload"))
        return None if payload is None else (message, payload)

    def _exactly(self, size: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self._socket.recv(size - len(parts))
            except OSError as error:
                if error.errno != errno.ECONNRESET:
                    raise
                return None
            if not part:
                return None
            parts += part
        return bytes(parts)

    def close(self) -> None:
        """Close this end: the other one receives None, also if a forked child has a copy of it."""
        with suppress(OSError):  # the other end is gone
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def described(error: BaseException) -> dict[str, Any]:
    """Return `error` as JSON."""
    kind = type(error).__mro__
    known = next((k.__name__ for k in kind if k.__module__ == errors.__name__), "IobenchError")
    number = error.errno if isinstance(error, OSError) else None
    name = error.filename if isinstance(error, OSError) else None
    text = error.strerror if isinstance(error, OSError) and error.errno else None
    return {
        "kind": known,
        "errno": number,
        "filename": None if name is None else str(name),
        "text": text or str(error) or type(error).__name__,
    }


def raise_described(found: dict[str, Any]) -> None:
    """Raise the error that the other process has described."""
    kind = getattr(errors, found["kind"], IobenchError)
    if issubclass(kind, OSError) and found["errno"]:
        raise kind(found["errno"], found["text"], found["filename"])
    with suppress(TypeError):  # some are made from other things than a text
        raise kind(found["text"])
    raise TransferError(found["text"])
