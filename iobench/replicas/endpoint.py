"""Endpoint: one connection to an agent, in its own node or another one."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, Self

from iobench.errors import ReplicaError
from iobench.ranks.messages import Message
from iobench.replicas.frames import Wire
from iobench.replicas.handshake import introduce
from iobench.replicas.recovery import Version
from iobench.replicas.segment import RankBytes
from iobench.units import GIB

__all__ = ["Address", "Endpoint", "described", "rank_of", "version_of"]

Address = tuple[str, int]
_LONGEST = GIB  # of digests and headers


class Endpoint:
    """Requests to one agent; each waits for its answer. One thread uses it at a time.

    Every method raises ReplicaError, also when the agent refuses.
    """

    def __init__(self, wire: Wire, token: bytes) -> None:
        self.wire = wire
        try:
            introduce(wire, token)
        except BaseException:
            wire.close()
            raise

    @classmethod
    def local(cls, path: Path, token: bytes, *, timeout_s: float | None) -> Self:
        """Connect to the agent of this node through its unix socket."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls._connected(connection, str(path), "the agent of this node", token, timeout_s)

    @classmethod
    def remote(cls, address: Address, token: bytes, *, timeout_s: float | None) -> Self:
        """Connect to the agent of another node."""
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        other = f"the agent at {address[0]}:{address[1]}"
        return cls._connected(connection, address, other, token, timeout_s)

    @classmethod
    def _connected(
        cls,
        connection: socket.socket,
        address: Any,
        other: str,
        token: bytes,
        timeout_s: float | None,
    ) -> Self:
        connection.settimeout(timeout_s)
        try:
            connection.connect(address)
        except OSError as error:
            connection.close()
            raise ReplicaError(f"{other} cannot be reached: {error.strerror or error}") from error
        return cls(Wire(connection, other, timeout_s), token)

    def ask(self, op: str, payload: bytes = b"", **fields: Any) -> Message:
        """Send a request and return the answer, which has no bytes."""
        self.wire.send({"op": op, **fields}, payload)
        return self.wire.answer()[0]

    def ask_fd(self, op: str, **fields: Any) -> tuple[Message, int]:
        """Send a request; return the answer and the open file that comes with it."""
        answer = self.ask(op, **fields)
        return answer, self.wire.receive_fd()

    def describe(self, rank: int, version: Version) -> RankBytes:
        """Return size, digests and header of a complete segment."""
        self.wire.send({"op": "describe", **described(rank, version)})
        answer, payload = self.wire.answer(_LONGEST)
        cut = int(answer["digests"])
        return RankBytes(int(answer["size"]), payload[:cut], payload[cut:])

    def close(self) -> None:
        """Close the connection."""
        self.wire.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def described(rank: int, version: Version) -> Message:
    """Return the fields of a request that name a segment."""
    return {"version": version, "rank": rank}


def version_of(found: Message) -> Version:
    """Return the version in a message. Raises ReplicaError for anything else."""
    value = found.get("version")
    match value:
        case [int(serial), int(step), str(attempt)]:
            return Version(serial, step, attempt)
    raise ReplicaError(f"{value!r:.60} names no version")


def rank_of(found: Message) -> int:
    """Return the rank in a message. Raises ReplicaError for anything else."""
    rank = found.get("rank")
    if type(rank) is not int or rank < 0:
        raise ReplicaError(f"{rank!r:.60} names no rank")
    return rank
