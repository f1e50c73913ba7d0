"""The node counts of `--nodes`."""

from __future__ import annotations

import re

from iobench.errors import OptionError

__all__ = ["node_counts"]

_MOST = 64


def node_counts(text: str) -> list[int]:
    """Return the node counts in `text`, ascending: `2048`, `64,512`, `1024-131072` (doubling)."""
    counts: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", part)
        if not match or part.lstrip().startswith("0"):  # 2,048 is a mistake, not a list of 2 and 48
            raise OptionError(
                f"--nodes {text}: write 2048, 64,512,2048 or 1024-131072, from 1 up and without "
                "thousands separators"
            )
        low, high = int(match[1]), int(match[2] or match[1])
        if low > high:
            raise OptionError(f"--nodes {part.strip()}: the smaller number comes first")
        while low < high:
            counts.add(low)
            low *= 2
        counts.add(high)
    if len(counts) > _MOST:
        raise OptionError(f"--nodes names {len(counts)} sizes; {_MOST} are the most")
    return sorted(counts)
