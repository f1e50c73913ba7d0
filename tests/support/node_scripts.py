"""What processes do in the tests of support.nodes."""

from __future__ import annotations

import subprocess
import threading

__all__ = ["listen"]


def listen(seconds: float) -> None:
    """Wait in this process and in a child that has left it."""
    subprocess.Popen(["setsid", "sleep", str(seconds)])
    print("ready", flush=True)
    threading.Event().wait(seconds)
