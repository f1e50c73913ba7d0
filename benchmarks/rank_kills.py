"""Kill ranks of a job at random moments, again and again. The figures of docs/reliability.md.

    PYTHONPATH=tests python benchmarks/rank_kills.py --kills 1000 --seed 1

Four nodes are network namespaces with a rank each, which saves without a pause. Needs root. Every
attempt is checked, see tests/support/rank_kills.py; the first one that fails ends the run with
exit code 1 and shows the output of its ranks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from support.nodes import open_nodes
from support.rank_kills import RankKills
from support.train_scripts import newest_checked


def main() -> int:
    """Run the kills that the command line asks for, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="iobench-kills-") as name:
        directory = Path(name)
        run = directory / "run"
        run.mkdir()
        with open_nodes(4, directory=directory) as nodes:
            kills = RankKills(nodes=nodes, directory=run, newest=newest_checked, seed=asked.seed)
            while len(kills.attempts) < asked.kills:
                try:
                    kills.attempt()
                except Exception as error:  # noqa: BLE001 -- reported with what the ranks printed
                    print(f"attempt {len(kills.attempts)}: {type(error).__name__}: {error}")
                    print(nodes.shown(4))
                    return 1
                nodes.forget()
    _print_table(kills)
    return 0


def _print_table(kills: RankKills) -> None:
    ended_s = defaultdict(list)
    for attempt in kills.attempts:
        ended_s[attempt.fault].append(attempt.ended_s)
    print(f"seed {kills.seed}: {len(kills.attempts)} attempts, newest step {kills.held}")
    print("fault       attempts   until all survivors had ended: median, longest")
    for fault, found in sorted(ended_s.items()):
        print(f"{fault:<10} {len(found):>9}   {statistics.median(found):.1f} s, {max(found):.1f} s")


if __name__ == "__main__":
    sys.exit(main())
