"""A job of a ProcessGroup: runs the commands from a socket, in order, and sends the replies.

Started by its path as a separate program. The kernel kills it when its parent ends in any way.

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
    if os.getppid() != parent:  # it ended before prctl: the signal will never come
        return
    connection = Connection(socket)
    sys.path[:] = connection.recv()  # the parent's: unpickling imports the same modules

    from dataclasses import replace

    from iobench.bench.counters.monitor import Usage
    from iobench.bench.processes.group import Failed
    from iobench.bench.processes.job import Done, Job
    from iobench.bench.processes.loop import Loop

    job: Job | None = None
    while True:
        answer: object = None
        try:
            asked = connection.recv()
            if job is None:
                job = Job(asked)
                continue
            before = Usage.now()
            answer = asked.run(job, connection) if isinstance(asked, Loop) else asked(job)
            if isinstance(answer, Done):
                answer = replace(answer, usage=Usage.now() - before)
        except EOFError:
            return
        except Exception as error:  # noqa: BLE001 -- every error is sent as the reply
            answer = Failed(error=f"{type(error).__name__}: {error}")
        connection.send(answer)


if __name__ == "__main__":
    main()
