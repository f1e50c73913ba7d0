"""Ring: a queue of operations for the kernel. PyuringRing: io_uring by pyuring."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable
from typing import Any, Protocol

from iobench.environment.machine import describe_io_uring
from iobench.errors import UnavailableError

_TRANSIENT = {errno.EAGAIN, errno.EBUSY, errno.EINTR}
_PAUSE_S = 0.005
_PAUSES = 1000  # give up after 5 s in which the kernel takes and completes no operation

# COOP_TASKRUN, SINGLE_ISSUER, DEFER_TASKRUN (Linux >= 6.1): a completion interrupts no thread. The
# kernel processes it when the thread of the ring waits.
_FLAGS = 1 << 8 | 1 << 12 | 1 << 13


class Ring(Protocol):
    """A queue of operations for the kernel. Belongs to the thread that opened it.

    An error of `wait` is one of the ring itself: the state of its operations is unknown.
    """

    def write(self, fd: int, address: int, length: int, offset: int, tag: int) -> None:
        """Start a write of `length` bytes at `address`. After an OSError it never happens."""

    def read(self, fd: int, address: int, length: int, offset: int, tag: int) -> None:
        """Start a read of `length` bytes to `address`. After an OSError it never happens."""

    def wait(self) -> tuple[int, int]:
        """Wait for a completion; return its tag, and its count of bytes or negative errno."""

    def close(self) -> None:
        """Release the ring. Operations without a completion may still use their memory."""


class PyuringRing:
    """A ring for at most `depth` operations in flight.

    pyuring 0.3.0 behaves as follows (from its C source, and tried):
    - Every call releases the GIL. `write_async_ptr` and `read_async_ptr` queue *and* submit.
    - When they raise, the operation stays queued in memory that the kernel reads at the next
      submission. It would then use a block that has already returned to the pool. An operation
      cannot be removed from the queue. So a ring submits nothing after an error that is not
      transient.
    - They also raise EAGAIN when the queue is full, and then queue nothing. The queue is never
      full, as a ring has room for all operations that its user has in flight.
    - A wait never submits, and ends with EINTR when a signal arrives.
    - It loses the errno of a ring that cannot be set up: iobench makes that system call once more.
    - Registered buffers and files work for one operation at a time only, with a wait for each. They
      are not used here.
    """

    def __init__(self, depth: int) -> None:
        """Raises UnavailableError with reason and remedy."""
        self._ring = _set_up(depth)
        self._stuck = False  # whether an operation may be queued that the kernel has not taken
        self._broken: BaseException | None = None

    def write(self, fd: int, address: int, length: int, offset: int, tag: int) -> None:
        self._check_not_broken()
        if self._try(self._ring.write_async_ptr, fd, address, length, offset, tag) is None:
            self._stuck = True

    def read(self, fd: int, address: int, length: int, offset: int, tag: int) -> None:
        self._check_not_broken()
        if self._try(self._ring.read_async_ptr, fd, address, length, offset, tag) is None:
            self._stuck = True

    def wait(self) -> tuple[int, int]:
        for _ in range(_PAUSES):
            self._push()
            # A wait for an operation that the kernel has not taken might never end.
            ring, stuck = self._ring, self._stuck
            found: tuple[int, int] | None
            found = self._try(ring.peek_completion if stuck else ring.wait_completion)
            if found is not None:
                return found
            time.sleep(_PAUSE_S)
        self._broken = OSError(errno.EAGAIN, "the kernel takes no io_uring operation")
        raise self._broken

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

    def _try(self, call: Callable[..., Any], *arguments: int) -> Any:
        """Return the result of `call`; None after a transient error of the kernel.

        After any other error the ring is broken.
        """
        try:
            return call(*arguments)
        except BaseException as error:
            if isinstance(error, OSError) and error.errno in _TRANSIENT:
                return None
            self._broken = error
            raise

    def _check_not_broken(self) -> None:
        """Raise OSError after an error that is not transient: submitting again is unsafe then."""
        if self._broken is not None:
            number = getattr(self._broken, "errno", None) or errno.EIO
            raise OSError(number, f"the io_uring has failed: {self._broken}") from self._broken


def _set_up(depth: int) -> Any:
    pyuring = _pyuring()
    try:
        with contextlib.suppress(OSError):  # an older kernel
            return pyuring.UringCtx(entries=depth, setup_flags=_FLAGS)
        return pyuring.UringCtx(entries=depth, setup_flags=0)
    except OSError as error:
        known = describe_io_uring()
        if known.works:  # a small ring works
            raise UnavailableError(
                "uring",
                f"the kernel refuses a ring of {depth} operations.",
                "Lower iodepth, or raise the limits of memory and open files.",
            ) from error
        raise UnavailableError("uring", f"io_uring is {known.reason}.", known.remedy) from error


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
