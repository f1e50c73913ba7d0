"""Kill trainings with offloaded state at random calls, again and again. Figures of docs/offload.md.

    PYTHONPATH=tests python benchmarks/offload_kills.py --kills 500 --seed 1

After each kill, what resume finds is compared with a stock training that was never interrupted: all
parameters, masters, moments and counters of the newest generation and of each pin. The first
difference ends the run with exit code 1. Half of the trainings update chunks during backward.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from support.offload_kills import OffloadKills


def main() -> int:
    """Run the kills that the command line asks for, and print how many were where."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    moments, began = random.Random(asked.seed), time.monotonic()
    points: Counter[str] = Counter()
    kills = OffloadKills()
    with tempfile.TemporaryDirectory(prefix="iobench-kills-") as name:
        while kills.kills < asked.kills:
            before = kills.kills
            try:
                point = kills.kill_at_random(Path(name) / "state", moments)
            except Exception as error:  # noqa: BLE001 -- reported with the point
                print(f"{type(error).__name__}: {error}\n{getattr(error, '__notes__', '')}")
                return 1
            points[re.sub(r":\d+", "", point)] += kills.kills - before
    for point, count in points.most_common():
        print(f"{count:6} {point}")
    elapsed_s = time.monotonic() - began
    print(f"{kills.kills} kills, {kills.finished} trainings that ended, {elapsed_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
