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
_PAUSES = 1000  # give up after 5 s in which the kernel takes no operation

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
      submission. After a transient error that is the next thing to do. After any other the kernel
      would use a block that has already returned to the pool, and an operation cannot be removed
      from the queue. So a ring submits nothing after that.
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
        self._broken: BaseException | None = None

    def write(self, fd: int, address: int, length: int, offset: int, tag: int) -> None:
        self._start(self._ring.write_async_ptr, fd, address, length, offset, tag)

    def read(self, fd: int, address: int, length: int, offset: int, tag: int) -> None:
        self._start(self._ring.read_async_ptr, fd, address, length, offset, tag)

    def _start(self, call: Callable[..., object], *arguments: int) -> None:
        """Submit one operation. After an error it stays queued, and nothing is submitted again."""
        if self._broken is not None:
            number = getattr(self._broken, "errno", None) or errno.EIO
            raise OSError(number, f"the io_uring has failed: {self._broken}") from self._broken
        try:
            try:
                call(*arguments)
            except OSError as error:
                if error.errno not in _TRANSIENT:
                    raise
                self._resubmit()
        except BaseException as error:
            self._broken = error
            raise

    def _resubmit(self) -> None:
        """Submit the operation that is queued, until the kernel takes it."""
        for _ in range(_PAUSES):
            time.sleep(_PAUSE_S)
            try:
                if self._ring.submit():
                    return
            except OSError as error:
                if error.errno not in _TRANSIENT:
                    raise
        raise OSError(errno.EAGAIN, "the kernel takes no io_uring operation")

    def wait(self) -> tuple[int, int]:
        while True:
            try:
                found: tuple[int, int] = self._ring.wait_completion()
                return found
            except InterruptedError:
                continue
            except BaseException as error:
                self._broken = error
                raise

    def close(self) -> None:
        self._ring.close()


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
