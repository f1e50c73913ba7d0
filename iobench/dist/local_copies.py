"""LocalCopies: which ranks of a node have copied their state in a save."""

from __future__ import annotations

import mmap
import os
import secrets
import time
import warnings
import weakref
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from iobench.dist.world import World

__all__ = ["LocalCopies"]

_LINE = 64  # bytes between two counters: each has its own line of the CPU's caches
_TIMES = 2.0
_LEAST_S = 0.05
_PART = 0.05
_SHORTEST_S, _LONGEST_S = 0.0005, 0.02
_ABSENT = np.iinfo(np.int64).max


class LocalCopies:
    """Lets the background of a rank wait until the other ranks of its node have copied too.

    A rank that has copied would write its part at once. Where the node has fewer free CPUs than
    ranks, this takes processor time from the ranks that still copy, and makes their stall longer. A
    low priority does not prevent that: torchrun starts each rank in a session of its own, and
    between sessions the kernel divides the CPU without regard to nice (sched(7), autogroup).

    The ranks share a memory file with the number of the last save that each has copied. Local rank
    0 makes it; the others open it through /proc. It ends with the processes, also after kill -9.
    The ranks agree about each save when they begin it, so none of them begins much later.
    """

    def __init__(
        self,
        world: World,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._world, self._clock, self._sleep = world, clock, sleep
        self._copied: NDArray[np.int64] | None = None
        self._offer: list[str] | None = None
        self._taken_s, self._copy_s = clock(), 0.0
        if world.local_rank == 0 and world.local_size > 1:
            name = f"iobench-copies-{secrets.token_hex(8)}"
            fd = os.memfd_create(name, os.MFD_CLOEXEC)
            self._close = weakref.finalize(self, os.close, fd)
            os.ftruncate(fd, world.local_size * _LINE)
            self._copied = _counters(fd)
            self._copied[:] = _ABSENT
            self._copied[0] = 0
            self._offer = [f"/proc/{os.readlink('/proc/self')}/fd/{fd}", name]

    @property
    def place(self) -> list[object]:
        """What this rank tells the others, as JSON: host, node, and its memory file."""
        return [self._world.host, self._world.node, self._offer]

    def join(self, places: Iterable[list[object]]) -> None:
        """Use the memory file of local rank 0. `places` are those of all ranks.

        Warns if it cannot be opened (RuntimeWarning). This rank then waits for no other one.
        """
        here = self.place[:2]
        offer = next((one[2] for one in places if one[:2] == here and one[2]), None)
        if self._copied is not None or not isinstance(offer, list):
            return
        path, name = map(str, offer)
        try:
            # First: this may be another process, of another namespace, and its file a pipe.
            if name not in os.readlink(path):
                raise FileNotFoundError(2, "not the memory file of local rank 0", path)
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                copied = _counters(fd)
            finally:
                os.close(fd)
            copied[self._world.local_rank] = 0
            self._copied = copied
        except (OSError, ValueError, IndexError) as error:
            warnings.warn(
                f"{self._world} cannot see the copies of the other ranks of its node, so stalls of "
                f"save_async may be longer ({error})",
                RuntimeWarning,
                stacklevel=2,
            )

    def begins(self) -> None:
        """This rank begins to copy now."""
        self._taken_s = self._clock()

    def ended(self, number: int) -> None:
        """This rank has copied save `number`, or cannot; from now on it waits for the others."""
        self._copy_s = self._clock() - self._taken_s
        if self._copied is not None:
            self._copied[self._world.local_rank] = number

    def wait(self, number: int) -> float:
        """Wait until all ranks of the node have copied save `number`. Return the seconds.

        At most twice the time of the own copy, and 50 ms: a rank that was killed or stopped does
        not delay the others.
        """
        began_s = self._clock()
        if self._copied is None:
            return 0.0
        until_s = began_s + _TIMES * self._copy_s + _LEAST_S
        pause_s = min(max(_PART * self._copy_s, _SHORTEST_S), _LONGEST_S)
        waited = False
        while self._copied.min() < number and self._clock() < until_s:
            self._sleep(pause_s)
            waited = True
        return self._clock() - began_s if waited else 0.0

    def close(self) -> None:
        """Leave: no rank waits for this one any more. Call it after all ranks have joined."""
        if self._copied is not None:
            self._copied[self._world.local_rank] = _ABSENT
            self._copied = None
        if self._offer is not None:
            self._offer = None
            self._close()


def _counters(fd: int) -> NDArray[np.int64]:
    """Map the memory file `fd`. Raises OSError, ValueError."""
    shared = mmap.mmap(fd, 0)  # all of it
    return np.frombuffer(shared, np.int64)[:: _LINE // 8]
