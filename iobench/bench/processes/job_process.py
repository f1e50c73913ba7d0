"""A job of a ProcessGroup: runs the commands that come through a socket, in order, and answers.

Run by path as a program of its own; it ends with the process that started it, however that ends.

    python job_process.py SOCKET PARENT     SOCKET is a file descriptor, PARENT a process id
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from multiprocessing.connection import Connection

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    socket, parent = map(int, sys.argv[1:])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked to be told
        return
    connection = Connection(socket)
    sys.path[:] = connection.recv()  # the parent's: the same modules are found

    from dataclasses import replace

    from iobench.bench.counters.monitor import Usage
    from iobench.bench.processes.group import Failed
    from iobench.bench.processes.job import Done, Job

    job: Job | None = None
    while True:
        answer: object = None
        try:
            asked = connection.recv()
            if job is None:
                job = Job(asked)
                continue
            before = Usage.now()
            answer = asked(job)
            if isinstance(answer, Done):
                answer = replace(answer, usage=Usage.now() - before)
        except EOFError:
            return
        except Exception as error:  # noqa: BLE001 -- whatever it is, it is the answer
            answer = Failed(error=f"{type(error).__name__}: {error}")
        connection.send(answer)


if __name__ == "__main__":
    main()
