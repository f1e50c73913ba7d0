"""A control group with a limit of memory, for processes that a test starts."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_VERSIONS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max"),
)


@dataclass(frozen=True)
class MemoryGroup:
    """A control group of either version. A process joins by writing its pid to cgroup.procs."""

    path: Path
    limit_file: str

    def limit(self, size_bytes: int) -> None:
        """Set the limit of memory."""
        (self.path / self.limit_file).write_text(str(size_bytes))


@contextmanager
def memory_group(size_bytes: int) -> Iterator[MemoryGroup]:
    """Make a group with this limit; skip the test where none can be made."""
    for parent, limit in _VERSIONS:
        group = MemoryGroup(parent / f"iobench-memory-{os.getpid()}", limit)
        try:
            group.path.mkdir()
        except OSError:
            continue
        try:
            try:
                group.limit(size_bytes)
            except OSError:  # this version has no memory controller here
                continue
            yield group
            return
        finally:
            group.path.rmdir()
    pytest.skip("no control group with a memory limit can be made here")
