"""Where the seconds of `iobench run` go: one run in this process, its wall time by what it did.

    python benchmarks/run_seconds.py --workload llama7b --size 1GiB --repeat 5 --target DIRECTORY

The arguments are those of `iobench run`, with one process. Each second of the main thread counts
once: the time of an inner step is not part of the outer one. What is timed by a sample's clock is
marked. "Freeing" is the time in which the file system and the device free removed files.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_BEGAN_S = time.perf_counter()


class Seconds:
    """Wall time of the main thread by step."""

    def __init__(self) -> None:
        self.seconds, self.calls = Counter[str](), Counter[str]()
        self._inner: list[float] = []

    def watch(self, owner: Any, name: str, step: str) -> None:
        """Count the time of the function `name` of a class or module as `step`."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def counted(*given: Any, **named: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return function(*given, **named)
            return self.count(step, lambda: function(*given, **named))

        setattr(owner, name, counted)

    def count(self, step: str, call: Callable[[], Any]) -> Any:
        """Call, and count the time as `step`, without that of steps inside."""
        began_s = time.perf_counter()
        self._inner.append(0.0)
        try:
            return call()
        finally:
            spent_s = time.perf_counter() - began_s
            self.seconds[step] += spent_s - self._inner.pop()
            self.calls[step] += 1
            if self._inner:
                self._inner[-1] += spent_s

    def watch_fio(self, jobs: Any) -> None:
        """Divide the time of a fio job into that of its own clock and the rest."""
        sample = jobs._sample

        def counted(*given: Any) -> Any:
            found = self.count("fio: start and end", lambda: sample(*given))
            self.seconds["fio: start and end"] -= found.elapsed_s
            self.seconds["fio (timed)"] += found.elapsed_s
            self.calls["fio (timed)"] += 1
            return found

        jobs._sample = counted

    def report(self, total_s: float) -> None:
        """Print a table, the longest step first."""
        self.seconds["other"] = total_s - sum(self.seconds.values())
        print(f"\n| step | s | times |\n| --- | ---: | ---: |\n| all | {total_s:.1f} | 1 |")
        for step, seconds in self.seconds.most_common():
            print(f"| {step} | {seconds:.1f} | {self.calls[step] or 1} |")


def main() -> None:
    """Run `iobench run` with the arguments of this script, and print the table."""
    from iobench.__main__ import run
    from iobench.bench.ceiling import CeilingJobs
    from iobench.bench.data.digests import Digests
    from iobench.bench.data.pool import RandomPool
    from iobench.bench.processes.job import Job
    from iobench.bench.targets import settle
    from iobench.bench.targets.directory import DirectoryScratch
    from iobench.checkpoint.staged import StagedCheckpoint

    seconds = Seconds()
    seconds.seconds["imports"] = time.perf_counter() - _BEGAN_S
    seconds.watch(Job, "save", "saves (timed)")
    seconds.watch(StagedCheckpoint, "publish", "saves (timed)")
    seconds.watch(Job, "restore", "restores (timed)")
    seconds.watch(settle, "_rests", "wait for an idle device")
    seconds.watch(Future, "result", "sync and freeing")  # of the thread of `settled`
    seconds.watch(RandomPool, "refill", "random bytes")
    seconds.watch(RandomPool, "scrub", "random bytes")
    seconds.watch(Digests, "remember", "digests of what is saved")
    seconds.watch(Digests, "compare_files", "digests of what was restored")
    seconds.watch(DirectoryScratch, "make_cold", "eviction")
    seconds.watch_fio(CeilingJobs)
    sys.argv = ["iobench", "run", *sys.argv[1:]]
    try:
        run()
    finally:
        seconds.report(time.perf_counter() - _BEGAN_S)


if __name__ == "__main__":
    main()
