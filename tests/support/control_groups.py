"""Control groups, of memory or of another resource, for processes that a test starts."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

MEMORY = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "{}"),
    (Path("/sys/fs/cgroup"), "memory.max", "{}"),
)
"""For both versions of control groups: where they are, and the file and text of a limit."""


@dataclass(frozen=True)
class ControlGroup:
    """A control group of either version. A process joins by writing its pid to cgroup.procs."""

    path: Path
    limit_file: str
    text: str

    def limit(self, value: int) -> None:
        """Set the limit, in bytes or in bytes per second."""
        (self.path / self.limit_file).write_text(self.text.format(value))


@contextmanager
def control_group(
    value: int, versions: tuple[tuple[Path, str, str], ...] = MEMORY
) -> Iterator[ControlGroup]:
    """Make a group with this limit; skip the test where none can be made.

    It is removed at the end: its processes must have ended.
    """
    for parent, limit_file, text in versions:
        group = ControlGroup(parent / f"iobench-{limit_file}-{os.getpid()}", limit_file, text)
        try:
            group.path.mkdir()
        except OSError:
            continue
        try:
            try:
                group.limit(value)
            except OSError:  # this version has no such controller here
                continue
            yield group
            return
        finally:
            group.path.rmdir()
    pytest.skip(f"no control group with {versions[-1][1]} can be made here")
