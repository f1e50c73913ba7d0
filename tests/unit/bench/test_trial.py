"""What the clock of a save and of a restore includes."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.one_by_one import OneByOne

from iobench.bench.contenders.base import WriterContender
from iobench.bench.counters import monitor as counters
from iobench.bench.counters.monitor import Counters
from iobench.bench.judging.verdict import violations
from iobench.bench.processes import job
from iobench.bench.targets.instruments import Instruments
from iobench.bench.trial import Trial
from iobench.checkpoint.manifest import MANIFEST
from iobench.environment import DeviceCounters
from iobench.errors import TransferError
from iobench.results.codec import from_record, to_record
from iobench.workloads import Workload
from iobench.writers import transfer
from iobench.writers.base import Writer
from iobench.writers.image import FileImage
from iobench.writers.registry import make

from .conftest import make_trial

TICK = 2.0**-20
STORING = ("buffered", "uncached", "odirect")


class Recorder:
    """A clock that advances by one second for each call that makes data durable."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self._lock = 0.0, threading.Lock()
        self.events: list[tuple[str, str]] = []
        for name in ("fsync", "fdatasync", "replace", "rename"):
            monkeypatch.setattr(os, name, self._recorded(name, getattr(os, name)))
        time = SimpleNamespace(
            perf_counter=self.read, process_time=self.read, thread_time=self.read
        )
        for module in (counters, transfer, job):
            monkeypatch.setattr(module, "time", time)

    def read(self) -> float:
        with self._lock:
            self.now += TICK
            return self.now

    def _recorded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(first: Any, *rest: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
            kind = "directory" if os.path.isdir(path) else "file"
            with self._lock:  # several threads sync
                self.now += 1.0
                self.events.append((f"{name} {kind}", path))
            return call(first, *rest)

        return recorded


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def trial(writer: Writer, tiny: Workload, directory: Path, idle: Any) -> Trial:
    return make_trial(WriterContender(writer), tiny, directory, idle)


def require(name: str, directory: Path) -> Writer:
    writer = make(name)
    answer = writer.available(directory)
    if not answer.ok:
        pytest.skip(f"{name}: {answer.reason}")
    return writer


@pytest.mark.parametrize("name", STORING)
def test_the_clock_of_a_save_stops_when_all_is_durable(
    tmp_path: Path, tiny: Workload, idle: Any, clock: Recorder, name: str
) -> None:
    """Every sync and rename is inside the timed section, and none after it."""
    one = trial(require(name, tmp_path), tiny, tmp_path, idle)
    clock.events.clear()
    sample = one.save()
    assert sample is not None
    assert int(sample.elapsed_s) == len(clock.events)
    assert sample.elapsed_s - len(clock.events) < 0.5  # ticks of reading the clock
    assert sample.series is not None
    completed = sample.series.completed
    assert completed is not None
    assert len(completed) == math.ceil(sample.elapsed_s / 0.1)  # to the last sync and rename
    assert sum(completed) == sum(path.bytes for path in sample.paths.values())


def test_the_clock_starts_with_the_jobs(
    tmp_path: Path, tiny: Workload, idle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process has the clock of ranks: the staging directory exists before it starts."""
    one = trial(make("buffered"), tiny, tmp_path, idle)
    seen: list[list[str]] = []

    def recorded(*arguments: Any) -> Counters:
        seen.append(sorted(path.name for path in tmp_path.rglob("*step-*")))
        return Counters(*arguments)

    monkeypatch.setattr("iobench.bench.trial.Counters", recorded)
    assert one.save() is not None
    (names,) = seen
    assert len(names) == 1


@pytest.mark.parametrize("name", STORING)
def test_the_order_of_a_save(
    tmp_path: Path, tiny: Workload, idle: Any, clock: Recorder, name: str
) -> None:
    """Files are synced and renamed, then the manifest, then directories; rename, sync of the
    parent."""
    one = trial(require(name, tmp_path), tiny, tmp_path, idle)
    clock.events.clear()
    one.save()
    kinds = [kind for kind, _ in clock.events]
    paths = [path for _, path in clock.events]
    manifest = next(i for i, path in enumerate(paths) if path.endswith(MANIFEST))
    files = len(tiny.files())
    assert kinds[:manifest].count("fsync file") == kinds[:manifest].count("replace file") == files
    for index, (kind, path) in enumerate(clock.events[:manifest]):
        if kind == "replace file":
            assert ("fsync file", path) in clock.events[:index]
    commit = kinds[manifest + 1 :]
    assert commit[-2:] == ["rename directory", "fsync directory"]
    assert set(commit[:-2]) == {"fsync directory"}
    assert paths[-1] == str(tmp_path)
    assert (tmp_path / "step-0-0" / MANIFEST).is_file()


def test_the_commit_is_a_phase_of_its_own(
    tmp_path: Path, tiny: Workload, idle: Any, clock: Recorder
) -> None:
    """It has the time for manifest, directory syncs and rename, without the syncs of files."""
    one = trial(OneByOne(), tiny, tmp_path, idle)
    clock.events.clear()
    sample = one.save()
    assert sample is not None
    files = len(tiny.files())
    assert int(sample.phases_s["sync"]) == files
    assert int(sample.phases_s["sync"]) + int(sample.phases_s["commit"]) == len(clock.events)


def test_decisions_of_a_writer_are_recorded(tmp_path: Path, tiny: Workload, idle: Any) -> None:
    """A sample of `hybrid` has its decisions; a sample of a writer with one path has none."""
    one = trial(make("hybrid"), tiny, tmp_path, idle)
    made = one.save().decisions
    assert sum(made.values()) >= len(tiny.files())
    assert all(": " in decision for decision in made)
    one.clear()
    assert trial(make("buffered"), tiny, tmp_path, idle).save().decisions == {}


class _Flushes:
    """A device that is flushed by every sync of a file or directory."""

    files = ()

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._count, self._fsync = 0, os.fsync
        monkeypatch.setattr(os, "fsync", self._synced)

    def _synced(self, fd: int) -> None:
        self._count += 1
        self._fsync(fd)

    def read(self) -> DeviceCounters:
        return DeviceCounters(read_bytes=0, write_bytes=0, flushes=self._count)


class _NeverSyncs(OneByOne):
    name = "never-syncs"

    def write(self, image: FileImage, target: str | Path, **how: Any) -> transfer.Transfer:
        return replace(super().write(image, target, **how | {"durable": False}), durable=True)


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("honest", [True, False])
def test_the_flushes_of_the_commit_are_not_the_writers(
    tmp_path: Path, tiny: Workload, monkeypatch: pytest.MonkeyPatch, honest: bool, counts: bool
) -> None:
    """A writer that leaves the sync to the commit is found, where the kernel counts flushes."""
    device = _Flushes(monkeypatch)
    one = trial(make("buffered") if honest else _NeverSyncs(), tiny, tmp_path, device)
    instruments = Instruments(unseen="not asked", flush_counts=counts)
    sample = replace(one, target=replace(one.target, instruments=instruments)).save()
    assert sample is not None
    assert sample.stored is not None
    assert sample.stored.flushed is (honest if counts else None)


def test_the_reading_of_the_flushes_is_part_of_the_save(
    tmp_path: Path, tiny: Workload, idle: Any, clock: Recorder
) -> None:
    """It is in the time of the save, and not in that of its commit."""

    class Slow:
        files = ()

        def read(self) -> DeviceCounters:
            clock.now += 100
            return DeviceCounters(read_bytes=0, write_bytes=0)

    one = trial(make("buffered"), tiny, tmp_path, idle)
    instruments = Instruments(unseen="not asked", flush_counts=True)
    target = replace(one.target, monitor=Slow(), instruments=instruments)
    clock.events.clear()
    sample = replace(one, target=target).save()
    assert sample is not None
    assert sample.stored is not None
    assert sample.stored.flushed is False
    phases_s = sample.phases_s
    assert int(phases_s["sync"]) + int(phases_s["commit"]) == len(clock.events)
    assert int(sample.elapsed_s) == len(clock.events) + 100


@pytest.mark.parametrize("call", [1, 3, 8, 9])
def test_a_failing_sync_publishes_nothing(
    tmp_path: Path, tiny: Workload, idle: Any, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """If the sync of any file fails, there is an error and no checkpoint, complete or not."""
    one = trial(make("buffered"), tiny, tmp_path, idle)
    fsync, calls = os.fsync, []

    def failing(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == call:
            raise OSError(5, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(TransferError, match="Input/output error"):
        one.save()
    assert list(tmp_path.iterdir()) == []


class _NoFigures(OneByOne):
    """Reports figures that JSON cannot hold."""

    name = "no-figures"

    def write(self, image: FileImage, target: str | Path, **how: Any) -> transfer.Transfer:
        return replace(
            super().write(image, target, **how),
            phases_s={"gather": math.nan, "sync": -math.inf},
            paths={"buffered": transfer.PathCount(operations=1, bytes=math.nan)},
        )


def test_figures_that_no_record_can_hold(tmp_path: Path, tiny: Workload, idle: Any) -> None:
    """They are recorded as -1 with a note, so that the run goes on and the verdict is INVALID."""
    sample = trial(_NoFigures(), tiny, tmp_path, idle).save()
    assert sample is not None
    assert from_record(json.loads(json.dumps(to_record(sample), allow_nan=False))) == sample
    assert (sample.phases_s["gather"], sample.phases_s["sync"]) == (-1, -1)
    assert sample.notes == (
        "the writer reports nan s for the phase gather",
        "the writer reports -inf s for the phase sync",
        "the writer reports nan bytes for the path buffered",
    )
    texts = [reason.text for reason in violations(sample)]
    assert "phases that its time cannot hold" in texts
    assert "its paths do not add up to the bytes moved" in texts
