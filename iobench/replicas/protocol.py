"""The requests to a memory agent and its answers, and how to connect to one."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from iobench.errors import ReplicaError
from iobench.ranks.wire import Message, Wire, introduce
from iobench.replicas.recovery import Version

Address = tuple[str, int]
_Count = Annotated[int, Meta(ge=0)]

PURPOSE = "replicas"
"""What an agent listens for; a part of the proof."""


class Request(Message):
    """What an agent is asked for. The answer is `AgentDone` unless it is said here."""


class OfRank(Request):
    """About the bytes that a rank saved."""

    version: Version
    rank: _Count


class Sized(OfRank):
    """About bytes of a rank, one of `ranks`, that are new to the agent."""

    ranks: _Count
    size_bytes: _Count


class Start(Request):
    """A job starts: the ranks whose bytes this node keeps, and how many `ranks` run on it."""

    keeps: list[_Count]
    ranks: _Count
    budget_bytes: _Count | None


class Begin(Sized):
    """Provide memory for a save; its open file follows the answer."""


class Filled(Sized):
    """The memory of `Begin` is written. So many bytes of `digests` follow, and the header."""

    digests: _Count


class Push(OfRank):
    """Send the bytes to the agent at `address`; the answer is `Pushed`."""

    address: Address


class MeasureRate(Request):
    """Set the pace: the given one, or a `share` of the rate to `address`. The answer is `Rate`."""

    address: Address
    share: float
    rate_bytes_per_s: float | None


class Settle(Request):
    """Whether all ranks have `version`."""

    version: Version
    kept: bool


class Resume(Request):
    """Drop what is newer than `version`; None: everything."""

    version: Version | None


class Forget(Request):
    """Drop all versions of a step."""

    step: _Count


class Open(OfRank):
    """Pass the open file with the bytes, which follows the answer; readable only."""


class Finish(Request):
    """A rank of this node has ended well."""

    rank: _Count


class Stop(Request):
    """End, with all memory."""


class AgentStatus(Request):
    """The answer is `Facts`."""


class Describe(OfRank):
    """The answer is `Described`."""


class Get(OfRank):
    """Send the bytes [start, stop), which follow the answer."""

    start: _Count
    stop: _Count


class PutSegment(Sized):
    """Take the bytes, of which digests and header follow. The answer is `MissingPieces`.

    Then each `PutPart` is a message: pieces, and `Sent`, whose answer is another `MissingPieces`.
    """

    digests: _Count


class ProbeRate(Request):
    """Take the bytes that follow, and drop them."""


class Inventory(Request):
    """The answer is `Segments`."""


FOR_ALL = (Describe, Get, PutSegment, ProbeRate, Inventory)
"""What other nodes may ask for. The rest is for ranks of the agent's node, by its unix socket."""


class PutPart(Message):
    """What follows a `PutSegment`."""


class PutPiece(PutPart):
    """The bytes of a piece follow."""

    number: _Count


class Sent(PutPart):
    """All pieces that were missing were sent."""


class AgentDone(Message):
    """The request was carried out."""


class Described(Message):
    """So many bytes of `digests` follow, and the header."""

    size_bytes: _Count
    digests: _Count


class MissingPieces(Message):
    """The pieces that are missing, as [begin, end) of each run."""

    pieces: list[tuple[_Count, _Count]]


class Pushed(Message):
    """`damaged` counts the pieces that arrived with other bytes and were sent again."""

    sent_bytes: _Count
    damaged: _Count


class Rate(Message):
    """The pace that was set."""

    rate_bytes_per_s: float


class Segments(Message):
    """A description of every complete segment; see `Holdings.inventory`."""

    segments: list[dict[str, Any]]


class Facts(Message):
    """About an agent and its segments."""

    segments: list[dict[str, Any]]
    pid: int
    job: str
    location: str
    address: Address
    age_s: float
    trainers: int
    taken_bytes: int
    rate_bytes_per_s: float | None


def connect(to: Path | Address, token: bytes, *, timeout_s: float | None) -> Wire:
    """Connect to the agent of this node by its unix socket, or to that of another node.

    All errors of the connection are ReplicaErrors, also when the agent refuses.
    """
    address: str | Address
    if isinstance(to, Path):
        family, address, other = socket.AF_UNIX, str(to), "the agent of this node"
    else:
        family, address, other = socket.AF_INET, to, f"the agent at {to[0]}:{to[1]}"
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        connection.connect(address)
    except OSError as error:
        connection.close()
        raise ReplicaError(f"{other} cannot be reached: {error.strerror or error}") from error
    wire = Wire(connection, other, timeout_s, failure=ReplicaError)
    try:
        introduce(wire, token, PURPOSE)
    except BaseException:
        wire.close()
        raise
    return wire
