"""Handshake: both ends of a connection prove that they know the token of the job.

The token itself is not sent: each end sends a random number and answers the other's with an
HMAC-SHA256. The bytes that follow are not encrypted; the network of a job is trusted to carry them.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from functools import partial

from iobench.errors import ReplicaError
from iobench.replicas.frames import Wire

__all__ = ["accept", "introduce"]

_SERVER, _CLIENT = b"iobench-agent", b"iobench-client"


def accept(wire: Wire, token: bytes) -> Callable[[], None]:
    """Serve the handshake; return a call that sends its last answer, after which requests come.

    Raises ReplicaError when the other end does not know the token.
    """
    own = secrets.token_hex(16)
    wire.send({"nonce": own})
    message, _ = wire.answer()
    theirs, proof = str(message.get("nonce")), str(message.get("proof"))
    if not hmac.compare_digest(proof.encode(), _proof(token, _CLIENT, own, theirs)):
        wire.send({"error": "wrong token: this agent belongs to another job"})
        raise ReplicaError(f"{wire.other} came with a wrong token")
    wire.trust()
    return partial(wire.send, {"proof": _proof(token, _SERVER, theirs, own).decode()})


def introduce(wire: Wire, token: bytes) -> None:
    """Begin a connection. Raises ReplicaError when either end does not accept the other."""
    message, _ = wire.answer()
    theirs, own = str(message.get("nonce")), secrets.token_hex(16)
    wire.send({"nonce": own, "proof": _proof(token, _CLIENT, theirs, own).decode()})
    message, _ = wire.answer()
    expected = _proof(token, _SERVER, own, theirs)
    if not hmac.compare_digest(str(message.get("proof")).encode(), expected):
        raise ReplicaError(f"{wire.other} is not an agent of this job: its proof is wrong")
    wire.trust()


def _proof(token: bytes, role: bytes, first: str, second: str) -> bytes:
    text = b" ".join([role, first.encode(), second.encode()])
    return hmac.digest(token, text, "sha256").hex().encode()
