"""Run a command until it ends or standard input closes; then remove a directory.

Started by its path as a separate program, without imports of iobench. Standard input is a pipe from
the parent. The kernel closes the parent's end of it when the parent ends, also by SIGKILL.

    python supervise.py DIRECTORY COMMAND ...
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    directory, *command = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the pipe ends this program
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    watched = select.poll()
    watched.register(0, select.POLLIN | select.POLLHUP)
    watched.register(os.pidfd_open(child.pid), select.POLLIN)
    try:
        watched.poll()
    finally:
        child.kill()
        child.wait()
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
