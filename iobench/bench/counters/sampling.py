"""Read counters at an interval until standard input closes; write each reading as one line.

Started by its path as a separate program, without imports of iobench: a thread of the timed process
would use its CPU time and its GIL.

    python sampling.py INTERVAL_MS FILE ...     writes SECONDS<tab>TEXT<tab>TEXT ...

SECONDS are of CLOCK_MONOTONIC, the clock of all processes; TEXT is a file's content on one line.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

_LONGEST_BYTES = 4096


def main() -> None:
    interval_ms, *names = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the pipe ends this program
    files = [os.open(name, os.O_RDONLY) for name in names]
    watched = select.poll()
    watched.register(0, select.POLLIN | select.POLLHUP)
    while True:
        texts = [os.pread(file, _LONGEST_BYTES, 0).decode() for file in files]
        line = "\t".join([repr(time.monotonic()), *(" ".join(text.split()) for text in texts)])
        os.write(1, f"{line}\n".encode())
        if watched.poll(int(interval_ms)):
            return


if __name__ == "__main__":
    main()
