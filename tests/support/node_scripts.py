"""What processes do in the tests of support.nodes."""

from __future__ import annotations

import os
import socket
import subprocess
import threading

__all__ = ["listen", "reach", "run_points", "show"]


def show() -> None:
    """Print where this process runs."""
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    print(socket.gethostname(), *(os.environ[name] for name in names))


def listen(seconds: float) -> None:
    """Wait in this process and in a child that has left it."""
    subprocess.Popen(["setsid", "sleep", str(seconds)])
    print("ready", flush=True)
    threading.Event().wait(seconds)


def reach(host: str) -> None:
    """Exit with 0 if a port of `host` refuses the connection: its node was reached."""
    try:
        socket.create_connection((host, 9), timeout=0.5)
    except ConnectionRefusedError:
        print("reached")


def run_points() -> None:
    """Call a function three times."""
    from iobench import units

    for _ in range(3):
        print(units.parse_size("64k"), flush=True)
