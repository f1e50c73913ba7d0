"""push: sends a segment to the agent of another node at the agent's pace."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from iobench.errors import ReplicaError
from iobench.replicas.endpoint import Address, Endpoint, described
from iobench.replicas.pieces import span_of
from iobench.replicas.recovery import Version
from iobench.replicas.segment import MemorySegment
from iobench.units import MIB

if TYPE_CHECKING:
    from iobench.replicas.agent import Agent

__all__ = ["Pushed", "measure", "push"]

_TIMEOUT_S = 60.0
_TRIES = 3
_PROBE = 4 * MIB
_PROBE_S = 0.2
_AHEAD = 4  # so that the link is busy while an answer is on its way


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """`damaged` counts the pieces that arrived with other bytes and were sent again."""

    sent_bytes: int
    damaged: int


def push(segment: MemorySegment, version: Version, address: Address, agent: Agent) -> Pushed:
    """Send the bytes of `segment` to the agent at `address`. On return they are complete there.

    A piece that arrives damaged is sent again, twice at most. Raises ReplicaError.
    """
    part = segment.part
    if part is None:
        raise ReplicaError(f"step {version.step} was replaced before it was sent")
    sent = damaged = 0
    with Endpoint.remote(address, agent.token, timeout_s=_TIMEOUT_S) as other:
        answer = other.ask(
            "put",
            part.digests + part.header,
            **described(segment.rank, version),
            ranks=segment.ranks,
            size=part.size_bytes,
            digests=len(part.digests),
        )
        for attempt in range(_TRIES):
            missing = [n for begin, end in answer["missing"] for n in range(begin, end)]
            damaged += len(missing) if attempt else 0
            for number in missing:
                start, stop = span_of(number, part.size_bytes)
                other.wire.announce({"piece": number}, stop - start)
                bucket = agent.bucket
                other.wire.send_file(segment.fd, start, stop, bucket.take, bucket.unit_bytes)
                if segment.version != version:
                    raise ReplicaError(f"step {version.step} was replaced while it was sent")
                sent += stop - start
            other.wire.send({"sent": True})
            answer = other.wire.answer()[0]
            if not answer["missing"]:
                return Pushed(sent_bytes=sent, damaged=damaged)
    raise ReplicaError(
        f"{other.wire.other}: pieces of step {version.step} arrived damaged {_TRIES} times"
    )


def measure(address: Address, agent: Agent) -> float:
    """Return the rate to the agent at `address`, in bytes per second, measured in 0.2 s or more.

    The first 4 MiB warm the connection up and do not count.
    """
    payload = np.random.default_rng().integers(0, 256, _PROBE, np.uint8)
    with Endpoint.remote(address, agent.token, timeout_s=_TIMEOUT_S) as other:
        other.wire.send({"op": "probe"}, payload)
        other.wire.answer()
        began_s, sent, answered = time.monotonic(), 0, 0
        while time.monotonic() - began_s < _PROBE_S or not sent:
            other.wire.send({"op": "probe"}, payload)
            sent += 1
            if sent - answered > _AHEAD:
                other.wire.answer()
                answered += 1
        for _ in range(sent - answered):
            other.wire.answer()
        elapsed_s = time.monotonic() - began_s
    return sent * _PROBE / elapsed_s
