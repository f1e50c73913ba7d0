"""Ring: the little of io_uring that a transfer needs, over pyuring.

pyuring 0.3.0, as read in its C source and tried:
- Every call leaves the GIL. `write_async_ptr` and `read_async_ptr` queue *and* submit.
- When they raise, the operation stays queued in memory that the kernel looks at with the next
  submission: it would then read into a block, or write from one, that has been given back. There
  is no way to take it out of the queue. So a ring that failed in earnest submits nothing more.
- They raise EAGAIN also when the queue is full, and queue nothing then. It never is, as a ring has
  room for all operations that its user has in flight.
- A wait never submits, and ends with EINTR when a signal arrives.
- The errno of a ring that cannot be set up is lost, so the kernel is asked once more, by us.
- Registered buffers and files can only be used one operation at a time, waiting for each; so they
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
_PAUSES = 1000  # 5 s without a single operation taken or ended: give up

_COOP_TASKRUN, _SINGLE_ISSUER, _DEFER_TASKRUN = 1 << 8, 1 << 12, 1 << 13  # linux/io_uring.h
_WISHES = (
    _SINGLE_ISSUER | _COOP_TASKRUN | _DEFER_TASKRUN,  # Linux >= 6.1
    _SINGLE_ISSUER | _COOP_TASKRUN,  # >= 6.0
    _COOP_TASKRUN,  # >= 5.19
    0,
)


class Ring(Protocol):
    """A queue of operations that the kernel works on. Belongs to the thread that opened it.

    An error of `wait` or `peek` is the ring's own: what becomes of its operations is not known.
    """

    def write(self, fd: int, address: int, length: int, offset: int, tag: int) -> None:
        """Have `length` bytes at `address` written. After an OSError they never will be."""

    def read(self, fd: int, address: int, length: int, offset: int, tag: int) -> None:
        """Have `length` bytes read to `address`. After an OSError they never will be."""

    def wait(self) -> tuple[int, int]:
        """The tag of an operation that has ended, and its count of bytes or negative errno."""

    def peek(self) -> tuple[int, int] | None:
        """The same without waiting; None when none has ended."""

    def close(self) -> None:
        """Give the ring back. Operations that have not ended may still use their memory."""


class PyuringRing:
    """A ring for at most `depth` operations at once."""

    def __init__(self, depth: int) -> None:
        self._ring = _set_up(depth, setup_flags())
        self._stuck = False  # whether something may be queued that the kernel has not taken
        self._broken: BaseException | None = None

    def write(self, fd: int, address: int, length: int, offset: int, tag: int) -> None:
        self._queue(self._ring.write_async_ptr, fd, address, length, offset, tag)

    def read(self, fd: int, address: int, length: int, offset: int, tag: int) -> None:
        self._queue(self._ring.read_async_ptr, fd, address, length, offset, tag)

    def wait(self) -> tuple[int, int]:
        for _ in range(_PAUSES):
            self._push()
            # A wait for what the kernel has not taken might never end.
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

    def _queue(self, call: Callable[..., object], *arguments: int) -> None:
        self._expect_whole()
        if self._try(call, *arguments) is None:
            self._stuck = True

    def _push(self) -> None:
        """Have the kernel take what is queued, if it now does."""
        while self._stuck:
            self._expect_whole()
            taken = self._try(self._ring.submit)
            if taken is None:
                return
            self._stuck = taken > 0

    def _next(self, *, wait: bool) -> tuple[int, int] | None:
        """The next that has ended; None when there is none, or it cannot be waited for just now."""
        found: tuple[int, int] | None
        found = self._try(self._ring.wait_completion if wait else self._ring.peek_completion)
        return found

    def _try(self, call: Callable[..., Any], *arguments: int) -> Any:
        """What pyuring returns; None when the kernel turns the call down for the moment."""
        try:
            return call(*arguments)
        except BaseException as error:
            if isinstance(error, OSError) and error.errno in _TRANSIENT:
                return None
            self._broken = error
            raise

    def _expect_whole(self) -> None:
        """Raise OSError if anything has failed in earnest: to submit again would be wrong."""
        if self._broken is not None:
            number = getattr(self._broken, "errno", None) or errno.EIO
            raise OSError(number, f"the io_uring has failed: {self._broken}") from self._broken


def open_ring(depth: int) -> Ring:
    """A ring for `depth` operations at once. Raises UnavailableError with reason and remedy."""
    return PyuringRing(depth)


@functools.cache
def setup_flags() -> int:
    """The most of SINGLE_ISSUER, COOP_TASKRUN and DEFER_TASKRUN that kernel and binding take.

    With them a completion interrupts nobody: the kernel does its part when the ring's thread waits.
    Raises UnavailableError.
    """
    pyuring = _pyuring()
    for flags in _WISHES[:-1]:
        try:
            ring = pyuring.UringCtx(entries=1, setup_flags=flags)
        except OSError:  # an old kernel, or none of io_uring; the last wish tells
            continue
        ring.close()
        return flags
    return _WISHES[-1]


def _set_up(depth: int, flags: int) -> Any:
    try:
        return _pyuring().UringCtx(entries=depth, setup_flags=flags)
    except OSError as error:
        known = describe_io_uring()
        if known["works"]:  # a small one does
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
