"""The requests to a memory agent and its answers, and how to connect to one."""

from __future__ import annotations

import json
import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import xxhash
from msgspec import Meta

from iobench.checkpoint.ranked.messages import Part
from iobench.errors import ReplicaError
from iobench.ranks.wire import Message, Wire, introduce
from iobench.text import parse_json

__all__ = [
    *("CopySource", "MemoryCopy", "RecoveryPlan", "SaveHeader", "StoredCopy"),
    *("Version", "recovery_plan"),
]


class Version(NamedTuple):
    """One save of all ranks. Of two saves of a run, the later one has the greater `serial`.

    `attempt` is the token of the start of the job that made it. A step that was saved twice, before
    and after a restart, has two versions; their bytes are never mixed.
    """

    serial: int
    step: int
    attempt: str


class MemoryCopy(NamedTuple):
    """The complete bytes of `rank`, one of `ranks` that saved, in the memory of `node`."""

    version: Version
    rank: int
    ranks: int
    node: int


class StoredCopy(NamedTuple):
    """A committed checkpoint on storage: the bytes of all ranks."""

    version: Version


class CopySource(NamedTuple):
    """Where the bytes of a rank are; "own" and "peer" have a `node`."""

    kind: Literal["own", "peer", "storage"]
    node: int | None = None


@dataclass(frozen=True, kw_only=True)
class RecoveryPlan:
    """Sources of every rank's bytes of one version.

    `ranks` is the number of ranks that saved; None when only storage knows it. `holders` has the
    nodes with a rank's bytes. `passed_over` has newer versions that are not complete, with the
    reasons.
    """

    version: Version
    ranks: int | None
    stored: bool
    holders: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    passed_over: tuple[tuple[Version, str], ...] = ()

    def sources(self, rank: int, node: int) -> list[CopySource]:
        """Return where a reader on `node` finds the bytes that `rank` saved, nearest first."""
        held = self.holders.get(rank, ())
        found = [CopySource("own", node)] if node in held else []
        found += [CopySource("peer", other) for other in held if other != node]
        if self.stored:
            found.append(CopySource("storage"))
        return found


def recovery_plan(copies: Iterable[MemoryCopy | StoredCopy]) -> RecoveryPlan | None:
    """Return the plan for the newest version of which every rank's bytes can be had.

    A rank's bytes can be had from memory or from storage. None when no version is complete.
    """
    found: dict[Version, list[MemoryCopy | StoredCopy]] = defaultdict(list)
    for copy in copies:
        found[copy.version].append(copy)
    passed: list[tuple[Version, str]] = []
    for version in sorted(found, reverse=True):
        plan, lost = _plan_of(version, found[version])
        if plan is not None:
            return replace(plan, passed_over=tuple(passed))
        passed.append((version, f"no source has the bytes of {_some(lost)}"))
    return None


def _plan_of(
    version: Version, copies: list[MemoryCopy | StoredCopy]
) -> tuple[RecoveryPlan | None, list[int]]:
    """Return the plan, or None and the ranks whose bytes cannot be had."""
    holders: dict[int, set[int]] = defaultdict(set)
    memory = [copy for copy in copies if isinstance(copy, MemoryCopy)]
    for copy in memory:
        holders[copy.rank].add(copy.node)
    ranks = max((copy.ranks for copy in memory), default=None)
    stored = len(memory) < len(copies)
    lost = [rank for rank in range(ranks or 0) if rank not in holders]
    if lost and not stored:
        return None, lost
    nearest = {rank: tuple(sorted(nodes)) for rank, nodes in holders.items()}
    return RecoveryPlan(version=version, ranks=ranks, stored=stored, holders=nearest), lost


def _some(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{', ...' if len(ranks) > 8 else ''}"


@dataclass(frozen=True, kw_only=True)
class SaveHeader:
    """The part manifest of a rank. That of rank 0 has the table of the tensors of all ranks too."""

    part: Part
    created_s: float
    table: str | None = field(default=None, repr=False)

    def to_bytes(self) -> bytes:
        """Return the header as JSON, with a checksum of it in front."""
        document = [self.part.to_json().decode(), self.created_s, self.table]
        text = json.dumps(document, separators=(",", ":")).encode()
        return xxhash.xxh3_64_digest(text) + text

    @classmethod
    def parse(cls, data: bytes, where: str) -> SaveHeader:
        """Return the header in `data`. Raises ReplicaError for damage."""
        checksum, text = data[:8], data[8:]
        if xxhash.xxh3_64_digest(text) != checksum:
            raise ReplicaError(f"{where}: the header is damaged")
        part, created_s, table = parse_json(text)
        own = xxhash.xxh3_64_hexdigest(part.encode())
        return cls(part=Part.parse(part.encode(), own, where), created_s=created_s, table=table)


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
