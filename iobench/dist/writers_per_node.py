"""How many ranks of a node should write replicated state: measured, by short saves.

One writer per node and device is often the fastest (FastPersist, section 4.2): more of them share
the device and disturb each other.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from iobench.dist.control import Control
from iobench.dist.slices import slices
from iobench.errors import IobenchError, RankError
from iobench.units import MIB
from iobench.writers.base import Writer
from iobench.writers.image import Bytes, FileImage
from iobench.writers.removal import remove_file

__all__ = ["WritersPerNode", "fewest_writers", "measure_writers"]

_CLOSE = 0.95
_SAMPLE = 64 * MIB
_ROUNDS = 2


@dataclass(frozen=True, kw_only=True)
class WritersPerNode:
    """The number to use, and the rates in bytes per second of all nodes together by number."""

    writers: int
    rates: Mapping[int, float] = field(default_factory=dict)


def fewest_writers(rates: Mapping[int, float]) -> int:
    """Return the smallest number of writers with at least 95% of the best rate.

    Fewer writers make fewer files, and leave the other ranks' processors alone.
    """
    best = max(rates.values())
    return min(count for count, rate in rates.items() if rate >= _CLOSE * best)


def measure_writers(
    control: Control,
    writer: Writer,
    target: str,
    *,
    size_bytes: int = _SAMPLE,
    deadline_s: float = 600.0,
) -> WritersPerNode:
    """Save `size_bytes` on each node with 1, 2, 4, ... writers, all nodes at once; see `slices`.

    All ranks call it. `target` is a location that `writer` takes. Each number of writers is
    measured twice, and the faster save counts. Each rank removes the file it wrote. Raises
    RankError in all ranks when one of them fails.
    """
    nodes = control.all_gather("nodes", control.world.node, deadline_s=deadline_s)
    most = max(nodes.count(node) for node in set(nodes))
    counts = sorted({*(1 << power for power in range(most.bit_length())), most})
    rates = dict.fromkeys(counts, 0.0)
    if most == 1:
        return WritersPerNode(writers=1)
    data = np.random.default_rng().integers(0, 256, size_bytes, dtype=np.uint8)
    total = size_bytes * len(set(nodes))
    for _, count in ((number, count) for number in range(_ROUNDS) for count in counts):
        cut = slices([total], nodes, align=MIB, writers_per_node=count)
        own = sum(part.size_bytes for part in cut[control.world.rank])
        spent_s = _slowest(control, writer, target, data[:own], deadline_s)
        rates[count] = max(rates[count], total / spent_s)
    return WritersPerNode(writers=fewest_writers(rates), rates=rates)


def _slowest(
    control: Control, writer: Writer, target: str, data: Bytes, deadline_s: float
) -> float:
    """Write `data` of each rank at the same time; return the seconds of the slowest rank."""
    name = f".iobench-sample-{control.world.rank}"
    control.barrier("sample", deadline_s=deadline_s)
    began_s, error = time.monotonic(), None
    try:
        if len(data):
            writer.write(FileImage.of(name, [data]), target)
    except IobenchError as failure:
        error = failure
    spent_s = time.monotonic() - began_s
    try:
        every = control.all_gather("sampled", spent_s, deadline_s=deadline_s, error=error)
        return float(max(every))
    except RankError as told:
        raise error or told from told
    finally:
        if len(data):
            with contextlib.suppress(FileNotFoundError):
                remove_file(f"{target.rstrip('/')}/{name}", writer)
