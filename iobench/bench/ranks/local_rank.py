"""One rank that a run started itself: serves the run, and is killed when that ends in any way.

    python -m iobench.bench.ranks.local_rank RANK SIZE JOB PARENT     PARENT is a process id

It closes its standard output when it can connect; what it prints goes to standard error.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> int:
    rank, size, job, parent = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it ended before prctl: the signal will never come
        return 1
    ready = os.dup(1)
    os.dup2(2, 1)

    from iobench.bench.ranks.group import serve
    from iobench.bench.ranks.start import local_world
    from iobench.ranks.control import Control

    os.write(ready, b".")
    os.close(ready)
    try:
        with Control.connect(local_world(int(rank), int(size), job)) as control:
            return serve(control)
    except Exception:  # noqa: BLE001 -- the run has it: `control` sent it
        return 1


if __name__ == "__main__":
    sys.exit(main())
