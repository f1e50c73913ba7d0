"""Memory: a tier of host memory for snapshots, which wait there until they are written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from iobench.errors import OptionError
from iobench.units import parse_size

__all__ = ["Memory"]


@dataclass(frozen=True)
class Memory:
    """Host memory of a Checkpointer for snapshots: up to `size` bytes (`"8GiB"`).

    - neither `node` nor `path`: memory as the process gets it (DRAM)
    - `node`: memory of this NUMA node; CXL memory is often a node without CPUs
    - `path`: a directory on tmpfs or hugetlbfs, or a DAX device such as `/dev/dax0.0`

    It is taken when snapshots need it, and freed with the Checkpointer or with the process, also
    after a kill: no file of it has a name. In a job of several ranks `size` is that of a node: each
    of its ranks has an equal share. Raises OptionError for values out of range.
    """

    size: int | str
    node: int | None = None
    path: str | Path | None = None

    def __post_init__(self) -> None:
        if not self.size_bytes:
            raise OptionError("Memory: size must be at least 1 byte")
        if self.node is not None and (type(self.node) is not int or self.node < 0):
            raise OptionError(f"Memory: node={self.node!r}: the number of a NUMA node, 0 or more")
        if self.node is not None and self.path is not None:
            raise OptionError("Memory: give node or path, not both")

    @property
    def size_bytes(self) -> int:
        """The most that it may hold."""
        return parse_size(self.size, "size")

    def __str__(self) -> str:
        """Name of the tier in `Save.copies` and `loaded.sources`."""
        if self.path is not None:
            return f"memory of {self.path}"
        return "memory" if self.node is None else f"memory of node {self.node}"
