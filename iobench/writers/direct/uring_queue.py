"""Ring: the part of io_uring that a transfer needs, on top of pyuring.

pyuring 0.3.0 behaves as follows (from its C source, and tried):
- Every call releases the GIL. `write_async_ptr` and `read_async_ptr` queue *and* submit.
- When they raise, the operation stays queued in memory that the kernel reads at the next
  submission. It would then use a block that has already returned to the pool. An operation cannot
  be removed from the queue. Therefore a ring submits nothing after an error that is not transient.
- They also raise EAGAIN when the queue is full, and then queue nothing. The queue is never full, as
  a ring has room for all operations that its user has in flight.
- A wait never submits, and ends with EINTR when a signal arrives.
- It loses the errno of a ring that cannot be set up, so iobench makes that system call once more.
- Registered buffers and files work for one operation at a time only, with a wait for each. They
  are not used here.
"""

from __future__ import annotations

import errno
import functools
import time
from collections.abc import Callable
from typing import Any, Protocol

from iobench.environment.uring import describe_io_uring
from iobench.errors import UnavailableError

__all__ = ["PyuringRing", "Ring", "open_ring", "setup_flags"]

_TRANSIENT = {errno.EAGAIN, errno.EBUSY, errno.EINTR}
_PAUSE_S = 0.005
_PAUSES = 1000  # give up after 5 s in which the kernel takes and completes no operation

_COOP_TASKRUN, _SINGLE_ISSUER, _DEFER_TASKRUN = 1 << 8, 1 << 12, 1 << 13  # linux/io_uring.h
_FLAG_SETS = (
    _SINGLE_ISSUER | _COOP_TASKRUN | _DEFER_TASKRUN,  # Linux >= 6.1
    _SINGLE_ISSUER | _COOP_TASKRUN,  # >= 6.0
    _COOP_TASKRUN,  # >= 5.19
    0,
)


class Ring(Protocol):
    """A queue of operations for the kernel. Belongs to the thread that opened it.

    An error of `wait` or `peek` is one of the ring itself: the state of its operations is unknown.
    """

    def write(self, fd: int, address: int, length: int, offset: int, tag: int) -> None:
        """Start a write of `length` bytes at `address`. After an OSError it never happens."""

    def read(self, fd: int, address: int, length: int, offset: int, tag: int) -> None:
        """Start a read of `length` bytes to `address`. After an OSError it never happens."""

    def wait(self) -> tuple[int, int]:
        """Wait for a completion; return its tag, and its count of bytes or negative errno."""

    def peek(self) -> tuple[int, int] | None:
        """Like `wait`, but return None when no completion is available."""

    def close(self) -> None:
        """Release the ring. Operations without a completion may still use their memory."""


class PyuringRing:
    """A ring for at most `depth` operations in flight."""

    def __init__(self, depth: int) -> None:
        self._ring = _set_up(depth, setup_flags())
        self._stuck = False  # whether an operation may be queued that the kernel has not taken
        self._broken: BaseException | None = None

    def write(self, fd: int, address: int, length: int, offset: int, tag: int) -> None:
        self._check_not_broken()
        try:
            self._ring.write_async_ptr(fd, address, length, offset, tag)
        except BaseException as error:
            if not self._transient(error):
                raise
            self._stuck = True

    def read(self, fd: int, address: int, length: int, offset: int, tag: int) -> None:
        self._check_not_broken()
        try:
            self._ring.read_async_ptr(fd, address, length, offset, tag)
        except BaseException as error:
            if not self._transient(error):
                raise
            self._stuck = True

    def wait(self) -> tuple[int, int]:
        for _ in range(_PAUSES):
            self._push()
            # A wait for an operation that the kernel has not taken might never end.
            found = self._next(wait=not self._stuck)
            if found is not None:
                return found
            time.sleep(_PAUSE_S)
        self._broken = OSError(errno.EAGAIN, "the kernel takes no io_uring operation")
        raise self._broken

    def peek(self) -> tuple[int, int] | None:
        self._push()
        return self._next(wait=False)

    def close(self) -> None:
        self._ring.close()

    def _push(self) -> None:
        """Submit queued operations once more, as long as the kernel takes some."""
        while self._stuck:
            self._check_not_broken()
            taken = self._try(self._ring.submit)
            if taken is None:
                return
            self._stuck = taken > 0

    def _next(self, *, wait: bool) -> tuple[int, int] | None:
        """Return the next completion; None when there is none or the call fails transiently."""
        found: tuple[int, int] | None
        found = self._try(self._ring.wait_completion if wait else self._ring.peek_completion)
        return found

    def _try(self, call: Callable[..., Any], *arguments: int) -> Any:
        """Return the result of `call`; None after a transient error of the kernel."""
        try:
            return call(*arguments)
        except BaseException as error:
            if self._transient(error):
                return None
            raise

    def _transient(self, error: BaseException) -> bool:
        """Whether `error` is a transient one of the kernel. After any other, the ring is broken."""
        if isinstance(error, OSError) and error.errno in _TRANSIENT:
            return True
        self._broken = error
        return False

    def _check_not_broken(self) -> None:
        """Raise OSError after an error that is not transient: submitting again is unsafe then."""
        if self._broken is not None:
            number = getattr(self._broken, "errno", None) or errno.EIO
            raise OSError(number, f"the io_uring has failed: {self._broken}") from self._broken


def open_ring(depth: int) -> Ring:
    """Open a ring for `depth` operations in flight.

    Raises UnavailableError with reason and remedy.
    """
    return PyuringRing(depth)


@functools.cache
def setup_flags() -> int:
    """Return the most of SINGLE_ISSUER, COOP_TASKRUN and DEFER_TASKRUN that work here.

    With them a completion interrupts no thread: the kernel processes it when the thread of the ring
    waits. Raises UnavailableError.
    """
    pyuring = _pyuring()
    for flags in _FLAG_SETS[:-1]:
        try:
            ring = pyuring.UringCtx(entries=1, setup_flags=flags)
        except OSError:  # an old kernel, or one without io_uring: the caller finds out
            continue
        ring.close()
        return flags
    return _FLAG_SETS[-1]


def _set_up(depth: int, flags: int) -> Any:
    try:
        return _pyuring().UringCtx(entries=depth, setup_flags=flags)
    except OSError as error:
        known = describe_io_uring()
        if known["works"]:  # a small ring works
            raise UnavailableError(
                "uring",
                f"the kernel refuses a ring of {depth} operations.",
                "Lower iodepth, or raise the limits of memory and open files.",
            ) from error
        raise UnavailableError(
            "uring", f"io_uring is {known['reason']}.", known["remedy"]
        ) from error


def _pyuring() -> Any:
    try:
        import pyuring
    except (ImportError, OSError) as error:
        raise UnavailableError(
            "uring",
            f"pyuring cannot be loaded ({error}).",
            "Its wheels are for x86-64 and CPython up to 3.13: pip install pyuring==0.3.0",
        ) from error
    return pyuring
