"""Kill points: something happens to a process where a named function is called.

A point is written "NAME:before" or "NAME:after". NAME is the dotted name of a function or method,
such as "iobench.checkpoint.commit.Committer.commit". More words may follow: the number of the call
(1 is the first), and what happens: "kill" (SIGKILL, the default), "children" (SIGKILL of all child
processes), "stop" (SIGSTOP), "full" (OSError ENOSPC), "error" (RuntimeError), "slow" (waits 1 s),
"hang" (waits for a minute), "flip" (a bit of the function's last argument is flipped), "note"
(nothing: the line on stdout says that the function is called).

    "iobench.ranks.control.Control.gather:before:3:stop"

Production code has no hooks: the function is replaced in its module, and in every iobench module
that has imported it.
"""

import errno
import functools
import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def arm(point: str) -> None:
    """Replace the function that `point` names in this process.

    Raises AttributeError when there is no such function: a renamed one cannot make a test empty.
    """
    name, when, *rest = point.split(":")
    call, action = int(rest[0]) if rest else 1, rest[1] if rest[1:] else "kill"
    if when not in ("before", "after"):
        raise ValueError(f"{point}: 'before' or 'after'")
    owner, attribute = _owner(name)
    original = vars(owner)[attribute] if isinstance(owner, type) else getattr(owner, attribute)
    kind = type(original) if isinstance(original, staticmethod | classmethod) else None
    inner = original.__func__ if kind else original
    calls, lock = [0], threading.Lock()

    @functools.wraps(inner)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        with lock:
            calls[0] += 1
            due = calls[0] == call
        if due and when == "before":
            happen(action, point, arguments)
        value = inner(*arguments, **options)
        if due and when == "after":
            happen(action, point, arguments)
        return value

    wrapped = kind(wrapper) if kind else wrapper
    setattr(owner, attribute, wrapped)
    for module in [m for n, m in list(sys.modules.items()) if n.startswith("iobench")]:
        for key, value in list(vars(module).items()):
            if value is original:
                setattr(module, key, wrapped)


def _owner(name: str) -> tuple[Any, str]:
    """The module or class that has the function, and the function's name in it."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:-1]:
            owner = getattr(owner, part)
        getattr(owner, parts[-1])  # raises AttributeError
        return owner, parts[-1]
    raise AttributeError(f"no module of {name}")


def happen(action: str, point: str = "", arguments: Sequence[Any] = ()) -> None:
    """Do what a point asks for, after its name was written to stderr."""
    os.write(1 if action == "note" else 2, f"at {point} {action}\n".encode())
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "children":
        for path in Path("/proc/self/task").glob("*/children"):
            for child in path.read_text().split():
                os.kill(int(child), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), point)
    elif action == "error":
        raise RuntimeError(f"at {point}")
    elif action == "slow":
        threading.Event().wait(1)
    elif action == "hang":
        threading.Event().wait(60)
    elif action == "flip":
        memory = arguments[-1]
        memory[len(memory) // 2] ^= 1
    elif action != "note":
        raise ValueError(f"{action}: kill, children, stop, full, error, slow, hang, flip or note")
