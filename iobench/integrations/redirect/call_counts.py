"""CallCounts: the outcomes of one process's redirected calls, written to a file after each call."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from iobench.text import printable

__all__ = ["CallCounts", "Count", "merged"]

_SUFFIX = ".json"
_PROBLEM = ".problem"


@dataclass(kw_only=True)
class Count:
    """Number, bytes and seconds of calls with the same outcome."""

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0
    example: str = ""
    """The file of the first of these calls."""

    def add(self, other: Count) -> None:
        """Add the calls of `other`."""
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
    """Counts calls and writes all counts to this process's file in `directory` after every call.

    So the calls of a killed process are counted too. A forked child has counts of its own. A signal
    handler may save at any point: the interrupted call writes its counts at the latest.
    """

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self.forget()
        os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        """Reset all counts; a forked child calls this."""
        self._lock = threading.Lock()
        self._functions: dict[str, Function] = {}
        self._name = ""
        self._pending: deque[Callable[[], None]] = deque()

    def redirected(self, function: str, count: Count, fallbacks: Iterable[str] = ()) -> None:
        """Count a call that the writer did."""

        def add() -> None:
            entry = self._entry(function)
            entry.redirected.add(count)
            for text in fallbacks:
                entry.fallbacks[text] = entry.fallbacks.get(text, 0) + 1

        self._flush(add)

    def failed(self, function: str, count: Count) -> None:
        """Count a call that raised an error."""
        self._flush(lambda: self._entry(function).failed.add(count))

    def stock(self, function: str, reason: str, count: Count) -> None:
        """Count a call that the stock function did, by reason."""
        self._flush(lambda: self._entry(function).stock.setdefault(reason, Count()).add(count))

    def say(self, text: str) -> None:
        """Print a line on stderr at once."""
        print(f"iobench exec: {printable(' '.join(text.split()))}", file=sys.stderr)  # noqa: T201 -- for the script's user

    def seen(self) -> None:
        """Record that this process loaded a module that can save."""
        self._flush(lambda: None)

    def _entry(self, function: str) -> Function:
        return self._functions.setdefault(function, Function())

    def _flush(self, *changes: Callable[[], None]) -> None:
        """Apply the changes and write the file.

        Another thread, or the code that a signal handler interrupted, may hold the lock. The holder
        then applies these changes: waiting for the lock in a handler would deadlock.
        """
        self._pending.extend(changes)
        if not self._lock.acquire(blocking=False):
            return
        try:
            while self._pending:
                self._pending.popleft()()
            self._write()
        finally:
            self._lock.release()
            if self._pending:  # from another thread, or a signal handler, which may have raised
                self._flush()

    def _write(self) -> None:
        if not self._directory.is_dir():
            return  # `iobench exec` has ended; no process reads the counts
        self._name = self._name or f"{os.getpid()}-{os.urandom(4).hex()}"
        document = {
            "pid": os.getpid(),
            "argv": [*map(str, sys.argv)],
            "functions": {
                name: dataclasses.asdict(entry) for name, entry in self._functions.items()
            },
        }
        part = self._directory / f"{self._name}.part"
        try:
            part.write_text(json.dumps(document))
            part.replace(self._directory / f"{self._name}{_SUFFIX}")
        except OSError as error:
            self.say(f"not counted: {error}")


def merged(directory: str | Path) -> tuple[dict[str, Function], list[str], int]:
    """Add up all files in `directory`.

    Return the functions by name, the problems, and the number of processes that loaded a module
    to redirect.
    """
    functions: dict[str, Function] = {}
    problems: dict[str, None] = {}
    processes = 0
    for document in _documents(Path(directory)):
        processes += 1
        for name, entry in document["functions"].items():
            into = functions.setdefault(name, Function())
            into.redirected.add(Count(**entry["redirected"]))
            into.failed.add(Count(**entry["failed"]))
            for reason, count in entry["stock"].items():
                into.stock.setdefault(reason, Count()).add(Count(**count))
            for text, times in entry["fallbacks"].items():
                into.fallbacks[text] = into.fallbacks.get(text, 0) + times
    for path in sorted(Path(directory).glob(f"*{_PROBLEM}")):
        problems[path.read_text()] = None
    return dict(sorted(functions.items())), list(problems), processes


def _documents(directory: Path) -> Iterator[Mapping[str, Any]]:
    for path in sorted(directory.glob(f"*{_SUFFIX}")):
        yield json.loads(path.read_text())
