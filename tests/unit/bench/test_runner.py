"""The order of a run, its handling of failures, and that it leaves no files."""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.one_by_one import OneByOne

from iobench import linux
from iobench.bench import fio
from iobench.bench import plan as plan_module
from iobench.bench import trial as trials
from iobench.bench.axes import Axes
from iobench.bench.contenders.base import WriterContender
from iobench.bench.counters.monitor import Counters
from iobench.bench.data.digests import Digests
from iobench.bench.data.pool import RandomPool
from iobench.bench.fio import JOBS, FioJob, FioSample
from iobench.bench.judging.repeat import Repeat
from iobench.bench.judging.verdict import Context, with_verification
from iobench.bench.plan import Plan
from iobench.bench.runner import Runner
from iobench.bench.targets import base, directory
from iobench.bench.targets.base import OpenTarget, Scratch
from iobench.bench.targets.directory import DirectoryTarget
from iobench.environment import Machine, Storage
from iobench.errors import TransferError
from iobench.results import (
    CeilingSample,
    Cold,
    End,
    ResultFile,
    ResultWriter,
    Sample,
    read,
)
from iobench.results.file import RecordFile
from iobench.stats.comparison import noise_floor
from iobench.workloads import Workload
from iobench.writers.base import Writer
from iobench.writers.buffered import BufferedWriter
from iobench.writers.image import FileImage
from iobench.writers.registry import make
from iobench.writers.transfer import Transfer


class Log:
    """A Progress that records its calls."""

    def __init__(self) -> None:
        self.announced: int | None = 0
        self.steps: list[str] = []
        self.records: list[Sample | CeilingSample] = []

    def begin(self, steps: int | None) -> None:
        self.announced = steps

    def step(self, what: str) -> None:
        self.steps.append(what)

    def result(self, record: Any) -> None:
        self.records.append(record)


class FakeFio:
    """A double of `fio.started`: it makes a file that stays, like fio.

    `starts` is called when it starts, and `fails` when its clock runs; both may raise.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.arguments: list[dict[str, Any]] = []
        self.starts: Callable[[], None] = lambda: None
        self.fails: Callable[[FioJob, str], None] = lambda *_: None

    @contextmanager
    def __call__(
        self, job: FioJob, operation: str, directory: Path, size_bytes: int, **options: Any
    ) -> Iterator[Callable[[], FioSample]]:
        self.starts()

        def measure() -> FioSample:
            self.calls.append((job.name, operation))
            self.arguments.append({"size_bytes": size_bytes, **options})
            (directory / fio.FILE_NAME).touch()
            self.fails(job, operation)
            return FioSample(bytes=size_bytes, elapsed_s=1.0, cpu_s=0.1)

        yield measure


@pytest.fixture
def fake_fio(monkeypatch: pytest.MonkeyPatch, idle: object) -> FakeFio:
    """Replaces fio, syncs, the wait for a quiet device and the description of the machine, without
    delay."""
    made = FakeFio()
    monkeypatch.setattr(fio, "started", made)
    monkeypatch.setattr(plan_module, "fio_version", lambda: "3.33")
    monkeypatch.setattr(base, "settled", lambda *_: nullcontext())
    monkeypatch.setattr(os, "fsync", lambda _fd: None)
    # The probe of the directory would find that out: no page is counted as dirty.
    monkeypatch.setattr(linux, "cachestat_unsynced_bytes", lambda _fd: 0)
    monkeypatch.setattr(directory, "describe_machine", Machine)
    monkeypatch.setattr(directory, "describe_storage", lambda _path: Storage())
    # The tests' file system may be one that evicts nothing, and that is not the question here.
    cold = Cold(resident_bytes=0, resident_fraction=0.0, method="none", dropped_caches=False)
    monkeypatch.setattr(base, "make_cold", lambda _files: cold)
    # Nothing is read from the device, then, but other processes may: its counter decides nothing.
    monkeypatch.setattr(directory, "DeviceMonitor", lambda _path: idle)
    return made


@pytest.fixture
def execute(fake_fio: FakeFio, tiny: Workload, tmp_path: Path) -> Callable[..., ResultFile]:
    """Run a plan in an empty target. Return its result file, however it ended."""

    def run(
        *writers: Writer,
        repeat: int | Repeat = 2,
        aa: bool = False,
        seed: int = 1,
        ceiling: bool = True,
        log: Log | None = None,
        error: type[BaseException] | None = None,
        names: Sequence[str] = ("target",),
    ) -> ResultFile:
        targets, path = [tmp_path / name for name in names], tmp_path / "run.jsonl"
        for target in targets:
            target.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        plan = Plan(
            workload=tiny,
            full_bytes=tiny.size_bytes(),
            rank=0,
            contenders=tuple(map(WriterContender, writers)),
            targets=tuple(DirectoryTarget(path=target) for target in targets),
            axes=Axes(targets=tuple(map(str, targets)) if len(targets) > 1 else (None,)),
            repeat=Repeat(times=repeat) if isinstance(repeat, int) else repeat,
            aa=aa,
            ceiling=ceiling,
            seed=seed,
        )
        if error:
            with pytest.raises(error):
                _run(plan, path, log or Log())
        else:
            _run(plan, path, log or Log())
        assert [os.listdir(target) for target in targets] == [[]] * len(targets)
        return read(path)

    return run


def _run(plan: Plan, path: Path, log: Log) -> None:
    with ResultWriter(path) as results:
        Runner(plan=plan, results=results, progress=log).run()


def order(result: ResultFile, operation: str = "save") -> list[list[str]]:
    """Return the contenders of each repetition in their order."""
    samples = [
        (one.repetition, one.order, one.writer if isinstance(one, Sample) else one.job["name"])
        for one in (*result.samples, *result.ceiling)
        if one.operation == operation
    ]
    repetitions = 1 + max(repetition for repetition, _, _ in samples)
    return [
        [name for of, _, name in sorted(samples) if of == repetition]
        for repetition in range(repetitions)
    ]


def test_everyone_once_per_repetition(execute: Callable[..., ResultFile]) -> None:
    """Each writer and each job saves and restores once in every repetition; `null` only saves."""
    result = execute(make("buffered"), make("null"), make("uncached"), repeat=3)
    jobs = [job.name for job in JOBS]
    for contenders in order(result):
        assert Counter(contenders) == Counter(["buffered", "null", "uncached", *jobs])
    for contenders in order(result, "restore"):
        assert Counter(contenders) == Counter(["buffered", "uncached", *jobs])
    assert result.end is not None
    assert (result.end.status, result.end.samples) == ("complete", 3 * 5)


def test_an_aa_run_has_the_first_contender_twice(execute: Callable[..., ResultFile]) -> None:
    """Its pairs give the noise floor. Their order is random like that of the others."""
    result = execute(make("buffered"), make("uncached"), repeat=5, ceiling=False, aa=True)
    for contenders in order(result):
        assert Counter(contenders) == Counter(["buffered", "buffered", "uncached"])
    for operation in ("save", "restore"):
        samples = [sample for sample in result.samples if sample.operation == operation]
        assert noise_floor(samples) is not None


def test_saves_that_follow_each_other_are_restored_once(
    execute: Callable[..., ResultFile],
) -> None:
    """The number of steps is unknown, and the restore of the first repetition proves all saves."""
    log = Log()
    sustained = Repeat.sustained("1h", None, None)
    result = execute(make("buffered"), repeat=replace(sustained, most=4), ceiling=False, log=log)
    operations = Counter(one.operation for one in result.samples)
    assert operations == {"save": 4, "restore": 1}
    assert log.announced is None
    assert all(one.verified for one in with_verification(result.samples, Context.of(result.run)))


class _Listing(BufferedWriter):
    """Counts the checkpoints that exist when a save begins."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def write_many(self, images: Iterable[FileImage], target: Any, **how: Any) -> Transfer:
        self.found.append(len([*Path(target).parent.glob("step-*")]))
        return super().write_many(images, target, **how)


def test_a_checkpoint_stays_until_the_next_one_is_saved(
    execute: Callable[..., ResultFile],
) -> None:
    """Where saves follow each other, none is written over the space of the one before; in another
    run each is removed first. Nothing stays behind in either."""
    sustained = replace(Repeat.sustained("1h", None, None), most=4)
    for repeat, before in ((sustained, [0, 1, 1, 1]), (4, [0, 0, 0, 0])):
        writer = _Listing()
        execute(writer, repeat=repeat, ceiling=False)
        assert writer.found[-4:] == before


def test_auto_does_not_wait_for_a_failed_contender(
    execute: Callable[..., ResultFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A contender that failed after two samples never gets a narrow interval: six repetitions are
    enough."""
    seen: list[set[str]] = []

    def goes_on(self: Repeat, done: int, samples: Sequence[Sample], elapsed_s: float) -> bool:
        seen.append({sample.writer for sample in samples})
        return done < self.times

    monkeypatch.setattr(Repeat, "goes_on", goes_on)
    result = execute(_Full(), make("uncached"), repeat=3, ceiling=False)
    assert [failure.repetition for failure in result.failures] == [1]
    assert seen == [set(), {"buffered", "uncached"}, {"uncached"}, {"uncached"}]


def test_the_order_is_random_and_seeded(execute: Callable[..., ResultFile]) -> None:
    """Repetitions differ in their order. The same seed gives the same orders."""
    writers = (make("null"), make("null", threads=2))
    one, again, other = (order(execute(*writers, repeat=4, seed=seed)) for seed in (5, 5, 6))
    assert one == again
    assert one != other
    assert len({tuple(contenders) for contenders in one}) > 1


def test_a_save_comes_right_before_its_restore(
    execute: Callable[..., ResultFile], fake_fio: FakeFio
) -> None:
    """Each contender restores its own last save, at the same position of the repetition."""
    log = Log()
    execute(make("buffered"), make("uncached"), log=log)
    for save, restore in zip(log.records[::2], log.records[1::2], strict=True):
        assert (save.operation, restore.operation) == ("save", "restore")
        assert (save.repetition, save.order) == (restore.repetition, restore.order)
    operations = [operation for _, operation in fake_fio.calls]
    assert operations == ["save", "restore"] * (2 * len(JOBS))


def test_nothing_is_prepared_while_a_clock_runs(
    execute: Callable[..., ResultFile], fake_fio: FakeFio, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making bytes, evicting, comparing, removing and waiting have ended when a clock starts.

    None of it begins before the clock stops, in any thread, and none of our threads is left.
    """
    ticks, spans, threads = itertools.count(), list[tuple[str, int, int]](), set[str]()

    def record(name: str, began: int) -> None:
        spans.append((name, began, next(ticks)))

    def untimed(where: Any, name: str) -> None:
        call = getattr(where, name)

        def recorded(*arguments: Any, **options: Any) -> Any:
            began = next(ticks)
            try:
                return call(*arguments, **options)
            finally:
                record(name, began)

        monkeypatch.setattr(where, name, recorded)

    @contextmanager
    def settled(*_: object) -> Iterator[None]:
        began = next(ticks)
        yield
        record("settled", began)

    class Clock(Counters):
        def __init__(self, *arguments: Any) -> None:
            self.began = next(ticks)
            threads.update(thread.name for thread in threading.enumerate())
            super().__init__(*arguments)

        def stop(self, *arguments: Any) -> Any:
            record("clock", self.began)
            return super().stop(*arguments)

    for where, name in [
        *((RandomPool, name) for name in ("renew", "scrub")),
        *((Digests, name) for name in ("remember", "compare_files")),
        (Scratch, "remove"),
        (base, "make_cold"),
    ]:
        untimed(where, name)
    monkeypatch.setattr(base, "settled", settled)
    monkeypatch.setattr(trials, "Counters", Clock)
    before = {thread.name for thread in threading.enumerate()}
    fake_fio.starts = lambda: record("fio starts", next(ticks))
    fake_fio.fails = lambda *_: record("clock", next(ticks))
    execute(make("buffered"), make("uncached"), names=("a", "b"))
    seen = Counter(name for name, _, _ in spans)
    assert seen["clock"] == 2 * 2 * 2 * (2 + len(JOBS))
    assert seen["settled"] == 2 * seen["clock"]  # of both targets
    assert {seen[name] for name in ("renew", "remember", "make_cold")} == {8}
    assert seen["scrub"] == 8 + 7  # a renewal scrubs, except the first one
    clocks = [(began, ended) for name, began, ended in spans if name == "clock"]
    for name, began, ended in spans:
        others = clocks if name != "clock" else [one for one in clocks if one != (began, ended)]
        assert all(ended < start or stop < began for start, stop in others), name
    for name in ("renew", "remember", "scrub"):  # inside the wait for an idle device
        inside = [(began, ended) for one, began, ended in spans if one == name]
        waits = [(began, ended) for one, began, ended in spans if one == "settled"]
        assert all(any(a < b and c < d for a, d in waits) for b, c in inside), name
    assert threads <= before


class _Full(OneByOne):
    """A disk that is full from the twelfth file on, below `there`."""

    def __init__(self, there: Path | str = "") -> None:
        super().__init__()
        self.there, self.files = str(there), 0

    def write(self, image: FileImage, target: str | Path, **options: Any) -> Transfer:
        if str(target).startswith(self.there):
            self.files += 1
            if self.files > 11:
                raise TransferError(28, "No space left on device", image.path)
        return super().write(image, target, **options)


def test_a_writer_that_fails_in_mid_run(execute: Callable[..., ResultFile]) -> None:
    """The End record has its error. Earlier samples stay, files do not."""
    result = execute(_Full(), repeat=3, ceiling=False, error=TransferError)
    assert [sample.operation for sample in result.samples] == ["save", "restore"]
    assert isinstance(result.end, End)
    assert result.end.status == "failed"
    assert "No space left on device" in str(result.end.error)


def test_one_of_several_contenders_fails(execute: Callable[..., ResultFile]) -> None:
    """Its error is recorded once, it does not take part again, and the others go on."""
    result = execute(_Full(), make("uncached"), repeat=3, ceiling=False)
    (failure,) = result.failures
    assert (failure.writer, failure.operation) == ("buffered", "save")
    assert "No space left on device" in failure.error
    counts = Counter((sample.writer, sample.operation) for sample in result.samples)
    assert counts["uncached", "save"] == counts["uncached", "restore"] == 3
    assert counts["buffered", "save"] == 1
    assert result.end is not None
    assert (result.end.status, result.end.samples) == ("complete", len(result.samples))


def test_several_targets_take_turns(execute: Callable[..., ResultFile], tmp_path: Path) -> None:
    """In each repetition every writer, its A/A twin and every fio job come once per target."""
    log = Log()
    names, writers = ("a", "b"), (make("buffered"), make("uncached"))
    result = execute(*writers, repeat=3, aa=True, log=log, names=names)
    places = [str(tmp_path / name) for name in names]
    assert list(result.run.environment.storages) == result.run.plan["targets"] == places
    assert (result.run.environment.storage, result.run.plan["target"]) == (
        Storage(),
        ",".join(places),
    )
    assert result.run.plan["baseline"] == {"target": places[0], "label": places[0]}
    assert len(log.steps) == log.announced
    for repetition in range(3):
        saves = [
            (one.order, one.writer if isinstance(one, Sample) else one.job["name"], target)
            for one in (*result.samples, *result.ceiling)
            if (one.repetition, one.operation) == (repetition, "save")
            and (target := one.axes.target if isinstance(one, Sample) else one.target)
        ]
        jobs = [job.name for job in JOBS]
        assert Counter(saved[1:] for saved in saves) == Counter(
            (name, place)
            for place in places
            for name in ("buffered", "buffered", "uncached", *jobs)
        )
    orders = [[one.axes.target for one in result.samples if one.repetition == n] for n in range(3)]
    assert len(set(map(tuple, orders))) > 1


@pytest.mark.parametrize(
    ("call", "at_end"), [("settled", False), ("settled", True), ("remove", False)]
)
def test_a_target_that_dies(
    execute: Callable[..., ResultFile],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    call: str,
    at_end: bool,
) -> None:
    """Outside of every trial: its writers and fio jobs end there, and the others go on."""
    owner = OpenTarget if call == "settled" else Scratch
    real, calls = getattr(owner, call), Counter[str]()

    def dies(where: Any, *arguments: Any) -> Any:
        name = getattr(where, "scratch", where).directory.parent.name
        calls[name] += 1
        if name != "b" or calls["b"] <= 5:
            return real(where, *arguments)
        ending = ExitStack()
        ending.callback(fails)
        return ending if at_end else fails()

    def fails() -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(owner, call, dies)
    writers = make("buffered"), make("uncached")
    result = execute(*writers, repeat=4, names=("a", "b"))
    dead, alive = str(tmp_path / "b"), str(tmp_path / "a")
    if call == "settled":
        assert calls["b"] == 6  # no more waits for it
    failed = [(one.writer, one.axes.target) for one in result.failures]
    assert sorted(failed) == [("buffered", dead), ("uncached", dead)]
    assert all("Input/output error" in one.error for one in result.failures)
    saves = [one for one in result.samples if one.operation == "save"]
    assert Counter(one.writer for one in saves if one.axes.target == alive) == {
        "buffered": 4,
        "uncached": 4,
    }
    assert len([one for one in saves if one.axes.target == dead]) < 8
    jobs = Counter(one.target for one in result.ceiling if one.operation == "save")
    assert jobs[alive] == 4 * len(JOBS)
    assert jobs[dead] < jobs[alive]
    assert result.end is not None
    assert result.end.status == "complete"


@pytest.mark.parametrize("waits", range(4))
def test_nothing_begins_in_a_dead_target(
    execute: Callable[..., ResultFile],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    waits: int,
) -> None:
    """Also not the operation that was announced when the target died."""
    settled, dead = OpenTarget.settled, set[str]()
    left = iter(range(waits))

    def dies(where: Any, *arguments: Any) -> Any:
        there = where.scratch.directory.parent
        if there.name == "b" and next(left, None) is None:
            dead.add(str(there))
            raise OSError(5, "Input/output error")
        return settled(where, *arguments)

    class Late(BufferedWriter):
        def write(self, image: FileImage, target: str | Path, **options: Any) -> Transfer:
            assert not any(str(target).startswith(one) for one in dead)
            return super().write(image, target, **options)

        def read(self, image: FileImage, target: str | Path, **options: Any) -> Transfer:
            assert not any(str(target).startswith(one) for one in dead)
            return super().read(image, target, **options)

    monkeypatch.setattr(OpenTarget, "settled", dies)
    result = execute(Late(), repeat=1, names=("a", "b"), ceiling=False)
    (failure,) = result.failures
    assert failure.error == "OSError: [Errno 5] Input/output error"
    assert failure.setting.axes.target == str(tmp_path / "b")


def test_the_only_target_dies(
    execute: Callable[..., ResultFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends with its error."""

    def dies(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(OpenTarget, "settled", dies)
    result = execute(make("buffered"), make("uncached"), ceiling=False, error=OSError)
    assert len(result.failures) == 2
    assert result.end is not None
    assert result.end.status == "failed"


def test_an_interrupt_right_after_a_record(
    execute: Callable[..., ResultFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after a record leaves a readable file with the right count."""
    append, lines = RecordFile.append, []

    def interrupted(self: RecordFile, values: Mapping[str, Any]) -> None:
        append(self, values)
        lines.append(values)
        if len(lines) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(RecordFile, "append", interrupted)
    result = execute(make("buffered"), ceiling=False, error=KeyboardInterrupt)
    assert result.end is not None
    assert (result.end.status, result.end.samples, len(result.samples)) == ("interrupted", 1, 1)


@pytest.mark.parametrize(
    ("writers", "expected"),
    [
        (("buffered",), True),
        (("null",), True),
        (("buffered,fallocate=false",), False),
        (("buffered,fallocate=false", "uncached"), True),
    ],
)
def test_fio_reserves_space_as_the_writers_do(
    execute: Callable[..., ResultFile],
    fake_fio: FakeFio,
    writers: tuple[str, ...],
    expected: bool,
) -> None:
    """fio preallocates unless no writer of the run does."""
    made = []
    for text in writers:
        name, _, option = text.partition(",")
        made.append(make(name, fallocate=False) if option else make(name))
    execute(*made, repeat=1)
    assert {arguments["fallocate"] for arguments in fake_fio.arguments} == {expected}
