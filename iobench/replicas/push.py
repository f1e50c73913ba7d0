"""push: sends a segment to the agent of another node at the agent's pace, a TokenBucket."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from iobench.errors import ReplicaError
from iobench.replicas.protocol import (
    Address,
    AgentDone,
    MissingPieces,
    ProbeRate,
    Push,
    Pushed,
    PutPiece,
    PutSegment,
    Sent,
    connect,
)
from iobench.replicas.segment import MemorySegment, span_of
from iobench.units import MIB

__all__ = ["TokenBucket", "measure", "push"]

_TIMEOUT_S = 60.0
_TRIES = 3
_PROBE = 4 * MIB
_PROBE_S = 0.2
_AHEAD = 4  # so that the link is busy while an answer is on its way


class TokenBucket:
    """Lets `rate_bytes_per_s` pass on average, and no burst longer than `burst_s` of it.

    Each `take` books its bytes and then sleeps until they are due. So threads share the rate in the
    order of their calls. A rate of None is no limit.
    """

    def __init__(
        self,
        rate_bytes_per_s: float | None,
        *,
        burst_s: float = 0.01,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rate_bytes_per_s = rate_bytes_per_s
        self._burst_s, self._clock, self._sleep = burst_s, clock, sleep
        self._lock = threading.Lock()
        self._due_s = clock()

    @property
    def unit_bytes(self) -> int | None:
        """Bytes to take at once: what the rate gives in `burst_s`, at least 16 KiB; None: all."""
        rate = self.rate_bytes_per_s
        return None if rate is None else max(16 * 1024, int(rate * self._burst_s))

    def take(self, size_bytes: int) -> None:
        """Wait until `size_bytes` more may be sent."""
        rate = self.rate_bytes_per_s
        if rate is None:
            return
        with self._lock:
            begin_s = max(self._due_s, self._clock() - self._burst_s)
            self._due_s = begin_s + size_bytes / rate
            early_s = self._due_s - self._clock()
        if early_s > 0:
            self._sleep(early_s)


def push(segment: MemorySegment, request: Push, token: bytes, bucket: TokenBucket) -> Pushed:
    """Send the bytes of `segment` to another agent. On return they are complete there.

    A piece that arrives damaged is sent again, twice at most. Raises ReplicaError.
    """
    part, version = segment.part, request.version
    if part is None:
        raise ReplicaError(f"step {version.step} was replaced before it was sent")
    sent = damaged = 0
    with connect(request.address, token, timeout_s=_TIMEOUT_S) as other:
        put = PutSegment(version, segment.rank, segment.ranks, part.size_bytes, len(part.digests))
        answer = other.ask(MissingPieces, put, part.digests, part.header)
        for attempt in range(_TRIES):
            missing = [n for begin, end in answer.pieces for n in range(begin, end)]
            damaged += len(missing) if attempt else 0
            for number in missing:
                start, stop = span_of(number, part.size_bytes)
                other.send_file(
                    PutPiece(number), segment.fd, start, stop, bucket.take, bucket.unit_bytes
                )
                if segment.version != version:
                    raise ReplicaError(f"step {version.step} was replaced while it was sent")
                sent += stop - start
            other.send(Sent())
            answer, _ = other.receive(MissingPieces)
            if not answer.pieces:
                return Pushed(sent, damaged)
    raise ReplicaError(
        f"{other.other}: pieces of step {version.step} arrived damaged {_TRIES} times"
    )


def measure(address: Address, token: bytes) -> float:
    """Return the rate to the agent at `address`, in bytes per second, measured in 0.2 s or more.

    The first 4 MiB warm the connection up and do not count.
    """
    payload = np.random.default_rng().integers(0, 256, _PROBE, np.uint8)
    with connect(address, token, timeout_s=_TIMEOUT_S) as other:
        other.ask(AgentDone, ProbeRate(), payload)
        began_s, sent, answered = time.monotonic(), 0, 0
        while time.monotonic() - began_s < _PROBE_S or not sent:
            other.send(ProbeRate(), payload)
            sent += 1
            if sent - answered > _AHEAD:
                other.receive(AgentDone)
                answered += 1
        for _ in range(sent - answered):
            other.receive(AgentDone)
        elapsed_s = time.monotonic() - began_s
    return sent * _PROBE / elapsed_s
