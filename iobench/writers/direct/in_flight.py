"""Ring: io_uring by pyuring. InFlight: the operations of one ring, each continued to its end."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from iobench.environment.uring import describe_io_uring
from iobench.errors import UnavailableError, transfer_errors
from iobench.writers.image import Bytes
from iobench.writers.local.direct_file import DirectFile, read_on, written_on
from iobench.writers.transfer import Meter

_RING_TRANSIENT = {errno.EAGAIN, errno.EBUSY, errno.EINTR}
_RING_PAUSE_S = 0.005
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
            time.sleep(_RING_PAUSE_S)
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
            if isinstance(error, OSError) and error.errno in _RING_TRANSIENT:
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


_TRANSIENT = {errno.EAGAIN, errno.EINTR, errno.ECANCELED}
_PAUSE_S = 0.001
_TRIES = 100  # of an operation that fails with a transient error; each retry waits longer

OnComplete = Callable[[bool], None]
"""Completion callback: called once, when the kernel is done with the memory.

Its argument is True if all bytes were moved; only then it may raise. It is never called when the
ring failed: the kernel may still use the memory, which is lost.
"""

_lost: list[Bytes] = []
"""Memory of operations that cannot be awaited: never freed, as the kernel may still use it."""


@dataclass(slots=True, eq=False)
class DirectOperation:
    """Moves `data` to or from `offset` of `file`. The kernel uses `data` until `on_complete`.

    Lengths and offsets are multiples of the alignment. A read may want fewer bytes than `data` has,
    as the file may end there.
    """

    file: DirectFile
    data: Bytes
    offset: int
    wanted: int
    on_complete: OnComplete
    tag: int = 0
    done: int = 0
    calls: int = 0
    tries: int = 0
    began_s: float = 0.0


class InFlight:
    """Writes to files, or reads from files. Used by one thread.

    `close` waits for all operations in flight, then closes the ring: no memory is freed while the
    kernel uses it. After the ring itself failed, nothing is in flight any more, and the memory is
    lost. KeyboardInterrupt must not occur inside: it could come between a completion and the line
    that records it.
    """

    def __init__(self, ring: Ring, *, writes: bool, path: str, meter: Meter) -> None:
        self._ring, self._writes, self._path, self._meter = ring, writes, path, meter
        self._name, self._doing = ("write", "writing") if writes else ("read", "reading")
        # By tag, as io_uring completes them in any order.
        self._operations: dict[int, DirectOperation] = {}
        self._tag = 0

    def __len__(self) -> int:
        """Return the number of operations in flight."""
        return len(self._operations)

    def wait_one(self) -> None:
        """Wait until one operation is complete. Raises OSError, DataMismatchError."""
        while True:
            with self._meter.phase(self._name):
                tag, count = self._wait()
            if self._take_completion(tag, count):
                return

    def submit(self, operation: DirectOperation) -> None:
        """Start `operation`, or the rest of one that io_uring completed in part.

        Raises OSError; `on_complete` has been called then too. If the file has a name, the error of
        its operation is a TransferError with this name, whichever call raises it.
        """
        if not operation.tag:
            self._tag += 1
            operation.tag, operation.began_s = self._tag, time.perf_counter()
            self._operations[self._tag] = operation
        left, offset = operation.data[operation.done :], operation.offset + operation.done
        move = self._ring.write if self._writes else self._ring.read
        try:
            with self._meter.phase("submit"):
                move(operation.file.fd, left.ctypes.data, len(left), offset, operation.tag)
        except OSError as error:
            self._fail(operation, error)
        except BaseException:  # out of memory, before or after the kernel took the operation
            _lost.append(self._operations.pop(operation.tag).data)
            raise

    def _take_completion(self, tag: int, count: int) -> bool:
        """Return whether the operation is complete; otherwise submit the rest of it."""
        operation = self._operations[tag]
        try:
            complete = self._advance(operation, count)
        except BaseException as error:  # noqa: BLE001 -- raised by `_fail`
            self._fail(operation, error)
        if complete:
            self._meter.took(self._name, time.perf_counter() - operation.began_s)
            self._meter.count(self._path, len(operation.data), operation.calls)
            self._end(operation, ok=True)
        else:
            self.submit(operation)
        return complete

    def _advance(self, operation: DirectOperation, count: int) -> bool:
        """Record a completion; return whether the operation is complete."""
        operation.calls += 1
        if count < 0:  # memory is short, or the kernel's own worker was interrupted
            operation.tries += 1
            if -count not in _TRANSIENT or operation.tries > _TRIES:
                raise OSError(-count, os.strerror(-count))
            self._meter.retries += 1
            time.sleep(_PAUSE_S * (operation.tries - 1))
            return False
        operation.tries = 0
        done, offset, unit = operation.done, operation.offset, operation.file.alignment.offset
        if self._writes:
            operation.done = written_on(done, count, offset, unit)
        else:
            operation.done = read_on(done, count, operation.wanted, offset, unit)
        return operation.done >= operation.wanted

    def _fail(self, operation: DirectOperation, error: BaseException) -> NoReturn:
        self._end(operation, ok=False)
        if not operation.file.name:
            raise error
        with transfer_errors(self._doing, operation.file.name):
            raise error

    def _end(self, operation: DirectOperation, *, ok: bool) -> None:
        del self._operations[operation.tag]
        operation.on_complete(ok)

    def _wait(self) -> tuple[int, int]:
        """Return the next completion. After an error the memory in flight is never freed."""
        try:
            return self._ring.wait()
        except BaseException:
            _lost.extend(operation.data for operation in self._operations.values())
            self._operations.clear()
            raise

    def close(self, error: BaseException | None = None) -> None:
        """Wait for all operations in flight and close the ring; `error` is why it ends early."""
        try:
            while self._operations:
                tag, _ = self._wait()
                self._end(self._operations[tag], ok=False)
        except BaseException as broken:
            if error is None:
                raise
            error.add_note(f"the ring then failed to end: {broken!r}")
        finally:
            self._ring.close()
