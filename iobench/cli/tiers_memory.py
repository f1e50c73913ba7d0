"""The part of `iobench tiers DIRECTORY` about memory of a running process."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from iobench.text import printable
from iobench.units import format_rate, format_seconds, format_size

if TYPE_CHECKING:
    from iobench.tiers.memory_status import MemoryStatus


def print_memory(found: MemoryStatus) -> None:
    """Print the memory tiers of a run."""
    now_s = time.time()
    ranks = f", rank 0 of {found.ranks}: its share of the memory" if found.ranks > 1 else ""
    print(f"memory  of process {found.pid}{ranks}")
    for one in found.tiers:
        rate = "" if one.rate_bytes_per_s is None else f", {format_rate(one.rate_bytes_per_s)}"
        used = f"{format_size(one.used_bytes)} of {format_size(one.size_bytes)} used"
        print(f"  {printable(one.tier)}: {used}{rate}")
    lag_s = found.lag_s(now_s)
    print(f"  lag   {format_seconds(lag_s) if lag_s else 'none'}")
    for held in found.snapshots:
        state = "written" if held.written else "volatile"
        age = format_seconds(max(0.0, now_s - held.created_s))
        size = format_size(held.size_bytes)
        print(f"{held.step:>10}  {size:>10}  {age:>12}  {state:<8}  {printable(held.tiers)}")


def memory_document(found: MemoryStatus | None) -> dict[str, Any] | None:
    """Return the part of the JSON document about memory; None: no process has any."""
    return None if found is None else {**asdict(found), "lag_s": found.lag_s(time.time())}
