"""CallCounts: the outcomes of redirected calls, appended to one file by every process."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from iobench.text import printable

_CALLS = "calls.jsonl"


CallOutcome = Literal["redirected", "failed", "stock"]


@dataclass(kw_only=True)
class Count:
    """Number, bytes and seconds of calls with the same outcome."""

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0
    example: str = ""
    """The file of the first of these calls."""

    def add(self, other: Count) -> None:
        self.calls += other.calls
        self.bytes += other.bytes
        self.seconds += other.seconds
        self.example = self.example or other.example


@dataclass(kw_only=True)
class Function:
    """Calls of one function: those of the writer, those of stock by reason, and failed ones.

    `fallbacks` counts the writer's own fallbacks by text.
    """

    redirected: Count = field(default_factory=Count)
    failed: Count = field(default_factory=Count)
    stock: dict[str, Count] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)


class CallCounts:
    """Appends a line of JSON for each call to the file of all processes in `directory`.

    So the calls of a killed process are counted too. One write(2) appends a line, and it needs no
    lock: a signal handler or a forked child may save at any point.
    """

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)

    def add(self, function: str, outcome: CallOutcome, count: Count, **more: Any) -> None:
        """Record a call. `more`: the `reason` of a stock call, or the writer's own `fallbacks`."""
        self._append({"function": function, "outcome": outcome, "count": count, **more})

    def say(self, text: str) -> None:
        """Print a line on stderr at once."""
        print(f"iobench exec: {printable(' '.join(text.split()))}", file=sys.stderr)  # noqa: T201 -- for the script's user

    def seen(self) -> None:
        """Record that this process loaded a module that can save."""
        self._append({})

    def _append(self, call: dict[str, Any]) -> None:
        if not self._directory.is_dir():
            return  # `iobench exec` has ended; no process reads the counts
        line = json.dumps({"pid": os.getpid(), **call}, default=dataclasses.asdict) + "\n"
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            fd = os.open(self._directory / _CALLS, flags, 0o600)
            try:
                os.write(fd, line.encode())
            finally:
                os.close(fd)
        except OSError as error:
            self.say(f"not counted: {error}")


def merged(directory: str | Path) -> tuple[dict[str, Function], list[str], int]:
    """Add up the calls in `directory`.

    Return the functions by name, the problems, and the number of processes that loaded a module
    to redirect.
    """
    functions: dict[str, Function] = {}
    processes: set[int] = set()
    problems: dict[str, None] = {}
    for call in _calls(Path(directory, _CALLS)):
        if problem := call.get("problem"):
            problems[problem] = None
            continue
        processes.add(call["pid"])
        if len(call) == 1:
            continue
        count, outcome = Count(**call["count"]), call["outcome"]
        into = functions.setdefault(call["function"], Function())
        if outcome == "stock":
            into.stock.setdefault(call["reason"], Count()).add(count)
        else:
            getattr(into, outcome).add(count)
        for text in call.get("fallbacks", ()):
            into.fallbacks[text] = into.fallbacks.get(text, 0) + 1
    return dict(sorted(functions.items())), list(problems), len(processes)


def _calls(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the calls; a line that a full disk has cut short is not one."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(json.JSONDecodeError):
                yield json.loads(line)
