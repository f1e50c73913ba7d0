"""SyncRing: concurrent fsyncs of many files in the kernel, started by one system call."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import time
from collections.abc import Sequence
from typing import Self

import numpy as np

from iobench.environment.uring import explain_refusal
from iobench.errors import UnavailableError

__all__ = ["SyncRing"]

_SYS_SETUP, _SYS_ENTER, _SYS_REGISTER = 425, 426, 427  # the same numbers on every architecture here
_OP_FSYNC = 3  # linux/io_uring.h, like the following constants
_ENTER_GETEVENTS = 1
_REGISTER_IOWQ_MAX_WORKERS = 19  # since 5.15
_FEAT_SINGLE_MMAP = 1  # since 5.4
_OFF_SQ_RING, _OFF_SQES = 0, 0x10000000
_SQE_BYTES, _CQE_BYTES = 64, 16
_NEVER_RUN = {errno.EAGAIN, errno.EINTR, errno.ECANCELED}
_NOT_NOW = {errno.EAGAIN, errno.EBUSY, errno.EINTR}
_MASK = 0xFFFFFFFF
_PAUSE_S = 0.005
_PAUSES = 1000  # give up after 5 s in which the kernel takes nothing

_libc = ctypes.CDLL(None, use_errno=True)
_Words = ctypes.c_uint32 * 30  # struct io_uring_params


class _Queues:
    """The memory that a ring shares with the kernel: submission queue and completion queue.

    Counters only grow, modulo 2**32; the index of an entry is a counter modulo the queue size.
    """

    def __init__(self, fd: int, words: ctypes.Array[ctypes.c_uint32]) -> None:
        self.entries, results, features = words[0], words[1], words[5]
        if not features & _FEAT_SINGLE_MMAP:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        to_submit, ended = words[10:20], words[20:30]  # struct io_sqring_offsets, io_cqring_offsets
        size = max(to_submit[6] + 4 * self.entries, ended[5] + _CQE_BYTES * results)
        shared = np.frombuffer(mmap.mmap(fd, size, offset=_OFF_SQ_RING), np.uint32)
        slots = mmap.mmap(fd, _SQE_BYTES * self.entries, offset=_OFF_SQES)
        self._taken, self._queued = (shared[offset // 4 :][:1] for offset in to_submit[:2])
        self._seen, self._ended = (shared[offset // 4 :][:1] for offset in ended[:2])
        shared[to_submit[6] // 4 :][: self.entries] = np.arange(self.entries)
        self._operations = np.frombuffer(slots, np.uint32).reshape(self.entries, _SQE_BYTES // 4)
        self._operations[:] = 0
        self._operations[:, 0] = _OP_FSYNC
        found = shared[ended[5] // 4 :][: _CQE_BYTES // 4 * results]
        self._results = found.view(np.int32).reshape(results, _CQE_BYTES // 4)

    def queue(self, fds: Sequence[int]) -> None:
        """Queue an fsync of each, numbered from 0; the kernel takes them at the next call."""
        first = int(self._queued[0])
        places = (first + np.arange(len(fds))) % self.entries
        self._operations[places, 1] = fds
        self._operations[places, 8] = np.arange(len(fds))  # user_data, its lower half
        self._queued[0] = (first + len(fds)) & _MASK  # last: the kernel reads entries up to here

    def __len__(self) -> int:
        """Return the number of fsyncs that the kernel has not taken yet."""
        return (int(self._queued[0]) - int(self._taken[0])) & _MASK

    def take_ended(self) -> tuple[int, dict[int, int]]:
        """Return how many completed since the last call, and the results below 0 by number."""
        seen, ended = int(self._seen[0]), int(self._ended[0])
        count = (ended - seen) & _MASK
        found = self._results[(seen + np.arange(count)) % len(self._results)]
        self._seen[0] = ended  # after the copy above: the kernel may now reuse these entries
        return count, dict(found[found[:, 2] < 0][:, (0, 2)].tolist())


class SyncRing:
    """An io_uring for at most `entries` fsyncs in flight, run by `workers` threads of the kernel.

    pyuring makes only one fsync at a time, so this class makes the system calls itself. Running
    fsyncs use neither memory of the caller nor a thread of this process, so that no thread contends
    for the GIL. Used by one thread at a time. x86-64 only: it does not reorder loads with
    other loads.
    """

    def __init__(self, entries: int, workers: int) -> None:
        """Raises UnavailableError with reason and remedy."""
        if platform.machine() != "x86_64":
            raise UnavailableError("uring", f"not tried on {platform.machine()}.", "")
        self.entries = entries
        words = _Words()
        self._fd = _libc.syscall(
            ctypes.c_long(_SYS_SETUP), ctypes.c_uint(entries), ctypes.byref(words)
        )
        if self._fd < 0:
            reason, remedy = explain_refusal(ctypes.get_errno(), None)
            raise UnavailableError("uring", f"io_uring is {reason}.", remedy)
        self._queues: _Queues | None = None
        try:
            self._queues = _Queues(self._fd, words)
            limits = (ctypes.c_uint * 2)(workers, 0)
            self._call(_SYS_REGISTER, _REGISTER_IOWQ_MAX_WORKERS, ctypes.byref(limits), 2)
        except OSError as error:
            self.close()
            reason = f"io_uring cannot be set up for fsync ({error.strerror})."
            raise UnavailableError("uring", reason, "Use a kernel >= 5.15.") from error

    def sync(self, fds: Sequence[int]) -> dict[int, OSError]:
        """Call fsync(2) for each of `fds`; return the failures by index.

        As many run at once as the ring has entries. An fsync that the kernel returned without
        running it is made here. On return all have ended. Raises OSError when the ring itself
        fails; it is unusable after that.
        """
        failed: dict[int, OSError] = {}
        for start in range(0, len(fds), self.entries):
            for number, result in self._round(fds[start : start + self.entries]).items():
                error = OSError(-result, os.strerror(-result))
                if -result in _NEVER_RUN:
                    try:
                        os.fsync(fds[start + number])
                        continue
                    except OSError as found:
                        error = found
                failed[start + number] = error
        return failed

    def _round(self, fds: Sequence[int]) -> dict[int, int]:
        """Wait for an fsync of each; return the negative results by index."""
        queues = self._queues
        if queues is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        queues.queue(fds)
        failed: dict[int, int] = {}
        left, refusals = len(fds), 0
        while left:
            try:
                self._call(_SYS_ENTER, len(queues), left, _ENTER_GETEVENTS, None, 0)
            except OSError as error:
                refusals += error.errno != errno.EINTR
                if error.errno not in _NOT_NOW or refusals > _PAUSES:
                    raise
                time.sleep(_PAUSE_S if refusals else 0)
            count, negative = queues.take_ended()
            failed.update(negative)
            left -= count
        return failed

    def _call(self, number: int, *arguments: object) -> None:
        if _libc.syscall(ctypes.c_long(number), self._fd, *arguments) < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))

    def close(self) -> None:
        """Release the ring. Fsyncs in flight, after a failure, keep their files open themselves."""
        self._queues = None  # its mappings keep the ring open too
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
