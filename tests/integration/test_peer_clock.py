"""The clocks of our writers and of peers, by their time series: the same beginning, the same end.

Real peers, a real file system, and the kernel's own count of what this process read and wrote. It
is read at the moments that matter and not every 100 ms, so that no load on the machine blurs it.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from iobench import workloads
from iobench.bench.axes import Variant
from iobench.bench.choose import choose
from iobench.bench.contenders.base import Contender
from iobench.bench.counters import monitor as counters
from iobench.bench.counters.sampler import Reading
from iobench.bench.processes.job import Executor, Job
from iobench.bench.targets.base import OpenTarget
from iobench.bench.targets.directory import DirectoryScratch
from iobench.bench.trial import Trial
from iobench.results import Sample
from iobench.units import KIB, MIB

CONTENDERS = ("buffered", "peer:torch-save", "peer:dcp")
PAUSE_S = 0.35
LITTLE = 256 * KIB
"""Reading a module, a manifest, names: what may be read or written besides the data."""
READING = 4 * KIB
"""What reading the counters themselves comes to."""
MARK = 4 * MIB
"""What the set-up reads and writes of its own in these tests; never to be seen in a series."""


class Watch:
    """Replaces the sampler: readings of this process at the moments that `look` is called."""

    source = "process"

    def __init__(self) -> None:
        self.seen: dict[str, Reading] = {}

    def look(self, moment: str) -> None:
        now = counters._process_io()
        self.seen[moment] = Reading(
            at_s=time.perf_counter(), read_bytes=now["rchar"], write_bytes=now["wchar"]
        )

    def readings(self, since_s: float, until_s: float) -> list[Reading]:
        return sorted(
            (one for one in self.seen.values() if since_s < one.at_s < until_s),
            key=lambda one: one.at_s,
        )


class NoDevice:
    files = ()

    def read(self) -> None:
        return None


def tasks() -> set[int]:
    """Threads of this process, those of libraries too."""
    return {int(name) for name in os.listdir("/proc/self/task")}


class Stage:
    """A trial of one contender whose set-up does I/O of its own, and whose save and sync pause."""

    def __init__(
        self, name: str, tiny_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.watch, self.target = Watch(), target
        self.inside: list[set[int]] = []
        self.threads: list[int] = []
        chosen, _ = choose(name, str(target))
        self.contender: Contender = chosen[0]
        files = tuple(workloads.load(str(tiny_path)).files(0))
        job = Job(contenders=(self.contender,), files=(files,), pool_bytes=64 * MIB, seed=1)
        self.trial = Trial(
            run_id="0" * 16,
            repetition=0,
            order=0,
            variant=Variant(contender=self.contender),
            contender=0,
            shape=0,
            files=(files,),
            executor=Executor(job),
            target=OpenTarget(
                scratch=DirectoryScratch(directory=target),
                monitor=NoDevice(),
                sampler=self.watch,
            ),
        )
        self.contender.warm_up(target / "warm-up")
        self.before, self.count = tasks(), threading.active_count()
        for owner, method in ((Job, "prepare"), (Job, "scrub"), (Job, "verify")):
            self._mark(monkeypatch, owner, method)
        for method in ("save", "restore"):
            self._watch(monkeypatch, method)
        fsync = os.fsync

        def slow(fd: int) -> None:
            self.watch.seen.setdefault("before sync", _reading())
            fsync(fd)
            if stat.S_ISDIR(os.fstat(fd).st_mode):  # the last ones
                time.sleep(PAUSE_S)

        self.slow_sync: Callable[[int], None] = slow

    def _mark(self, monkeypatch: pytest.MonkeyPatch, owner: type, method: str) -> None:
        """Let the set-up write and read MARK bytes of its own, durably."""
        call = getattr(owner, method)

        def marked(job: Any, *rest: Any, **named: Any) -> Any:
            path = self.target / "mark"
            with path.open("wb") as file:
                file.write(os.urandom(MARK))
            path.read_bytes()
            path.unlink()
            return call(job, *rest, **named)

        monkeypatch.setattr(owner, method, marked)

    def _watch(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        call = getattr(type(self.contender), method)

        def watched(contender: Contender, *rest: Any) -> Any:
            self.threads.append(threading.active_count())
            time.sleep(PAUSE_S)  # one that has ended may be listed a moment longer
            self.inside.append(tasks())
            self.watch.look(f"{method} begins")
            done = call(contender, *rest)
            self.watch.look(f"{method} ends")
            return done

        monkeypatch.setattr(type(self.contender), method, watched)


def _reading() -> Reading:
    watch = Watch()
    watch.look("now")
    return watch.seen["now"]


@pytest.mark.parametrize("name", CONTENDERS)
def test_series_begin_at_zero_and_end_when_all_is_durable(
    name: str, tiny_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing moves before the contender does, all has moved before the sync, which is inside.

    Making the bytes, evicting and verifying do I/O in this test, and none of it is in a series; no
    thread of ours is alive while the contender runs.
    """
    if not counters._process_io():
        pytest.skip("this kernel does not count a process's I/O")
    stage = Stage(name, tiny_path, target, monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", stage.slow_sync)
        saved = stage.trial.save()
    assert saved is not None
    stored = sum(path.stat().st_size for path in (target / "step-0-0").rglob("*") if path.is_file())
    check(saved, stored)
    seen = stage.watch.seen
    until_sync = seen["before sync"].write_bytes - seen["save begins"].write_bytes
    assert until_sync > 0
    assert trailing_silence_s(saved, LITTLE) >= PAUSE_S - 0.1  # syncs, the last of directories

    restored = stage.trial.restore()
    assert restored is not None
    assert restored.verified is not None
    assert restored.verified.mismatches == 0
    check(restored, saved.bytes)

    assert stage.inside[0] <= stage.before
    assert stage.inside[1] <= stage.before
    assert stage.threads == [stage.count] * 2


def check(sample: Sample, moved: int) -> None:
    """All of the series is within the clock. It has all bytes of the data, and hardly more."""
    series = sample.series
    assert series is not None
    assert series.counter == "process"
    counted = series.counted
    assert counted is not None
    assert (len(counted) - 1) * series.interval_s < sample.elapsed_s
    assert moved <= sum(counted) < moved + MARK  # DCP reads some of it twice
    quiet = int(PAUSE_S / series.interval_s)
    assert sum(counted[:quiet]) < READING, "something moved before the contender began"
    if series.completed is not None:
        assert sum(series.completed[:quiet]) == 0
        assert sum(series.completed) >= sample.bytes


def trailing_silence_s(sample: Sample, little: int) -> float:
    """How long, up to the end of the clock, less than `little` was moved."""
    series = sample.series
    assert series is not None
    assert series.counted is not None
    silent = moved = 0
    for size in reversed(series.counted):
        moved += size
        if moved >= little:
            break
        silent += 1
    return max(0.0, sample.elapsed_s - (len(series.counted) - silent) * series.interval_s)
