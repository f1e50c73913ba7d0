"""The connections of an S3 client: one time limit for all requests.

botocore has no option for it. A timeout of its sockets counts for one receive, in each attempt:
requests with many parts and attempts have no common limit.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from iobench.errors import TransferError

_SHORTEST_S = 0.001


class TimeLimit:
    """The limit of all requests of one boto3 client, while one is set.

    Each connection, each block that is sent and each receive waits at most for the time that is
    left, and nothing is tried again after it.
    """

    def __init__(self) -> None:
        self._until_s = math.inf
        self.leaves_failed = False
        """Whether a `within` is entered: what fails is left to somebody who tidies up later."""

    @property
    def passed(self) -> bool:
        """Whether the limit of the `within` that is entered has passed."""
        return time.monotonic() >= self._until_s

    @contextmanager
    def within(self, limit_s: float | None, late: str = "") -> Iterator[None]:
        """End what still runs in the body after `limit_s` seconds. Not for two threads at once.

        A TransferError of the body has the text `late` then. None: no other limit than that of a
        `within` around it. What fails in the body leaves its uploads and objects to somebody who
        tidies up later: a server that does not answer would make the clean-up wait for its timeouts
        once more.
        """
        before = self._until_s, self.leaves_failed
        self.leaves_failed = True
        if limit_s is not None:
            self._until_s = time.monotonic() + limit_s
        try:
            yield
        except TransferError as error:
            if not (late and self.passed):
                raise
            raise TransferError(late) from error
        finally:
            self._until_s, self.leaves_failed = before

    def lift(self) -> bool:
        """Go on without a limit in the `within` that is entered. Return False if it has passed."""
        if self.passed:
            return False
        self._until_s = math.inf
        return True

    def wait(self, seconds: float, stop: threading.Event | None) -> bool:
        """Wait between two attempts; return True as soon as `stop` is set or the limit passed."""
        stopped = (stop or threading.Event()).wait(self.at_most(seconds))
        return stopped or self.passed

    def at_most(self, timeout_s: float) -> float:
        """Return `timeout_s`, or the time that is left if it is shorter."""
        return min(timeout_s, max(self._until_s - time.monotonic(), _SHORTEST_S))


def limit_connections(client: Any, limit: TimeLimit) -> None:
    """Apply `limit` to a boto3 client that has no connections yet."""
    pools = client._endpoint.http_session._pool_classes_by_scheme
    for scheme, pool in list(pools.items()):
        connection = _limited(pool.ConnectionCls, limit)
        pools[scheme] = type(pool.__name__, (pool,), {"ConnectionCls": connection})


def _limited(connection: Any, limit: TimeLimit) -> Any:
    """Return a subclass of botocore's `connection` whose sockets wait no longer than the limit.

    urllib3 sets `timeout` before it connects and sends, and again before it reads the answer.
    """

    class LimitedConnection(connection):  # type: ignore[misc]  # known at run time only
        sock: Any
        timeout: Any

        def connect(self) -> None:
            self.timeout = limit.at_most(self.timeout)
            super().connect()

        def send(self, data: Any) -> None:
            if self.sock is not None:  # else it connects
                self.sock.settimeout(limit.at_most(self.timeout))
            super().send(data)

        def getresponse(self, *given: Any, **named: Any) -> Any:
            self.timeout = limit.at_most(self.timeout)
            if self.sock is not None:  # urllib3 1 has set this timeout alone
                self.sock.settimeout(limit.at_most(self.sock.gettimeout()))
            return super().getresponse(*given, **named)

    return LimitedConnection
