"""The messages between rank 0, which answers calls of all ranks, and the ranks.

The values of the ranks are JSON in the bytes after a message. So the hub passes them on without a
look into them.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from iobench.errors import RankError
from iobench.ranks.wire import Message

PURPOSE = "calls"
"""What rank 0 listens for; a part of the proof."""

EVERY_RANK = "construct the Checkpointer in every rank, or pass world='alone'"
"""What to do about ranks that never connect."""

BEAT = -1
"""The number of pings whose answer only says that rank 0 lives."""

CallKind = Literal["all-gather", "gather", "broadcast", "scatter"]

Key = tuple[str, int]
"""A call: the name of its `sub` and its number there."""


class FromRank(Message):
    """What a rank sends to the hub."""


class FromHub(Message):
    """What the hub sends to a rank."""


class Call(FromRank):
    """This rank makes a call; its value follows."""

    key: Key
    kind: CallKind
    phase: str
    deadline_s: float
    aside: bool = False
    error: str | None = None
    acknowledged: bool = True


class Acknowledge(FromRank):
    """This rank has the answer to a call."""

    key: Key


class Ping(FromRank):
    """A sign of life, and a question for the time of rank 0."""

    number: int


class Close(FromRank):
    """This rank needs the others no more."""


class Fail(FromRank):
    """This rank cannot go on."""

    error: str
    exit_code: int


class CallAnswer(FromHub):
    """The answer to a call: `errors` as (rank, host, text), or the values, which follow.

    They are the same value so many `times`. With `acknowledge` the hub waits for an Acknowledge.
    """

    key: Key
    acknowledge: bool
    times: int = 1
    errors: list[tuple[int, str, str]] = []  # noqa: RUF012 -- msgspec copies an empty default


class Pong(FromHub):
    """The answer to a Ping."""

    number: int
    at_s: float


class Broken(FromHub):
    """The job cannot go on."""

    ranks: list[int]
    message: str
    exit_code: int = RankError.exit_code


def json_bytes(value: Any) -> bytes:
    """Return `value` as JSON in one line. Raises TypeError for more than JSON.

    Not by msgspec: it refuses names of files that are not UTF-8, and makes None of infinity.
    """
    return json.dumps(value, separators=(",", ":")).encode()
