"""Tuning: a checked request, its run with trial runner, journal and tuner, and its file."""

from __future__ import annotations

import hashlib
import random
import secrets
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from iobench._version import __version__
from iobench.bench.choose import target_of
from iobench.bench.contenders.base import WriterContender
from iobench.bench.judging.floors import Conditions, Floor, NearFloors
from iobench.bench.judging.verdict import Context, VerdictStatus, volatile_of
from iobench.bench.targets.base import Target
from iobench.environment import fingerprint
from iobench.environment.memory import available_bytes
from iobench.errors import ResultFileError, TargetError, UsageError
from iobench.results import utc_now
from iobench.text import printable
from iobench.tune.budget import TuningSizes, plan
from iobench.tune.journal import Journal, TrialRecord, TuningRecord, TuningRequest
from iobench.tune.objective import SLOTS, Measure, Measurement, Objective, Step
from iobench.tune.outcome import Outcome
from iobench.tune.race import Race
from iobench.tune.space import Candidate, Space, space_of
from iobench.tune.trial_runner import TrialRunner, warm_up_bytes
from iobench.tune.tuner import Tuner, TuningProgress
from iobench.units import GIB, format_size
from iobench.verification.imported import load_workload
from iobench.workloads import Workload
from iobench.workloads.specs import FileSpec
from iobench.writers.config import Tuned, dump_writer

_LARGEST = GIB  # of one trial, unless the user asks for more
_POOL_SHARE = 0.25  # of the available memory: the pools of four sizes, the others smaller
_LEAST_POOL = GIB


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """A tuning that is ready to run. `asked` names its target, seed and largest size too."""

    asked: TuningRequest
    workload: Workload
    target: Target
    space: Space
    objective: Objective
    seed: int
    largest_bytes: int
    """Limit for one trial; the tuner may choose less unless a size was asked for."""
    _actual: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Results of `actual_bytes`: every trial asks, and a layout has thousands of tensors."""

    @classmethod
    def of(cls, asked: TuningRequest) -> Tuning:
        """Return a checked tuning: names known, target writable, a writer available.

        Writes nothing yet. Raises UsageError and its subclasses, TargetError, UnavailableError; a
        UsageError where `max_bytes` does not suffice to compare two settings.
        """
        asked.budget()
        full = load_workload(asked.workload)
        if not full.files(asked.rank):
            raise UsageError(
                f"workload {full.name!r}: rank {asked.rank} writes no files; choose another"
            )
        goal = asked.goal()
        if "://" not in asked.target:
            target_of(asked.target, []).check()
        space = space_of(asked.target, asked.writers)
        place = target_of(asked.target, [WriterContender(space.baseline.make())])
        place.check()
        largest = asked.largest_bytes or _largest(
            goal, place, full.size_bytes(asked.rank), asked.size_bytes
        )
        full.scaled(largest, asked.rank)  # raises with the smallest possible size
        seed = secrets.randbits(32) if asked.seed is None else asked.seed
        made = cls(
            asked=replace(asked, target=place.location, seed=seed, largest_bytes=largest),
            workload=full,
            target=place,
            space=space,
            objective=goal,
            seed=seed,
            largest_bytes=largest,
        )
        made.left_out()
        return made

    @classmethod
    def resumed(cls, header: TuningRecord) -> Tuning:
        """Return the tuning of `header`.

        Raises UsageError on another machine or storage, and when the workload's files are others
        now.
        """
        asked = header.asked
        try:
            tuning = cls.of(asked)
        except TargetError as error:
            message = str(error).replace("--target ", "the journal's target ", 1)
            raise TargetError(message) from error
        here = tuning.header()
        if here.fingerprint != header.fingerprint:
            raise UsageError(
                f"this journal was begun on another machine or storage ({header.fingerprint} and "
                f"not {here.fingerprint}): its samples do not go together with new ones; start anew"
            )
        if header.files_sha256 not in ("", here.files_sha256):
            raise UsageError(
                f"the files of workload {asked.workload} are others than when this journal was "
                "begun: its samples do not go together with new ones; start anew"
            )
        return tuning

    @property
    def full_bytes(self) -> int:
        """Bytes of the rank's checkpoint at full size."""
        return self.workload.size_bytes(self.asked.rank)

    def actual_bytes(self, wanted_bytes: int) -> int:
        """Return the bytes of the checkpoint for `wanted_bytes`, computed from its layout."""
        if wanted_bytes not in self._actual:
            scaled = self.workload.scaled(wanted_bytes, self.asked.rank)
            self._actual[wanted_bytes] = scaled.size_bytes(self.asked.rank)
        return self._actual[wanted_bytes]

    def judged_by(self, records: Path) -> Tuning:
        """Return the tuning with the noise floor that the A/A records in a directory give it.

        A stall has none: `iobench run` does not measure it.
        """
        machine, storage = self.target.describe()
        here = Conditions.of(machine, storage, self.actual_bytes(self.largest_bytes))
        near = NearFloors(records)
        floors = [near.of(here, (one, None, None)) for one in self.objective.operations]
        floor = max(floors, key=lambda one: one.part, default=Floor())
        asked = replace(self.asked, floor=floor.part, floor_record=floor.record)
        return replace(self, asked=asked)

    def header(self) -> TuningRecord:
        """Return the first line of its journal."""
        machine, storage = self.target.describe()
        return TuningRecord(
            started_at=utc_now(),
            command=("iobench", *sys.argv[1:]),
            iobench=__version__,
            asked=self.asked,
            machine=machine,
            storage=storage,
            fingerprint=fingerprint(machine, storage),
            files_sha256=files_digest(self.workload.files(self.asked.rank)),
        )

    def sizes(self) -> TuningSizes:
        """Return the sizes to begin with."""
        fixed = self.asked.size_bytes is not None
        return TuningSizes(largest=self.largest_bytes, fixed=fixed, fits=self._fits)

    def tuner(self, measure: Measure, progress: TuningProgress) -> Tuner:
        """Return the tuner, which calls `measure` for every trial."""
        race = Race(
            objective=self.objective,
            budget=self.asked.budget(),
            measure=measure,
            written_bytes=self.written_bytes,
            report=progress.trial,
            rng=random.Random(self.seed),
        )
        return Tuner(
            space=self.space,
            race=race,
            sizes=self.sizes(),
            progress=progress,
            floor=self.asked.floor,
            context=Context(
                workload_bytes=0,
                scale=f"{format_size(self.actual_bytes(self.largest_bytes))} at most"
                if self.largest_bytes < self.full_bytes
                else None,
                volatile={None: volatile_of(self.target.describe()[1])},
            ),
        )

    def left_out(self) -> list[str]:
        """Return in words what --max-bytes leaves out of a full search."""
        full, planned = plan(self.space, self.sizes(), self.written_bytes, self.asked.max_bytes)
        return list(planned.less_than(full))

    def runner(self) -> TrialRunner:
        """Return the runner of its trials."""
        return TrialRunner(
            target=self.target,
            workload=self.workload,
            rank=self.asked.rank,
            objective=self.objective,
            seed=self.seed,
            pool_bytes=max(_LEAST_POOL, int(_POOL_SHARE * (available_bytes() or 0))),
        )

    def written_bytes(self, wanted_bytes: int, verify: bool) -> int:
        """Return the most bytes that a trial of that size writes."""
        copies = self.objective.writes(verify)
        return self.actual_bytes(wanted_bytes) * copies + warm_up_bytes(wanted_bytes)

    def _fits(self, size_bytes: int) -> bool:
        try:
            self.actual_bytes(size_bytes)
        except UsageError:
            return False
        return True


def files_digest(files: Iterable[FileSpec]) -> str:
    """Return the SHA-256 of paths, formats, tensors and sizes of `files`, in their order."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(repr(file).encode())
    return digest.hexdigest()


def _largest(objective: Objective, target: Target, full_bytes: int, size_bytes: int | None) -> int:
    """Return the largest size of a confirmation. Raises TargetError where `size_bytes` is too much.

    It is at most half of the available memory.
    """
    held = SLOTS + 1 if objective.goal == "stall" else 1
    free, memory = target.free_bytes(), available_bytes()
    room = min(
        full_bytes,
        *([] if free is None else [free // held]),
        *([] if memory is None else [memory // (2 * held)]),
    )
    if size_bytes is not None:
        if room < min(size_bytes, full_bytes):
            raise TargetError(
                f"--size {format_size(size_bytes)}: {format_size(room)} are the most that disk and "
                "memory have room for"
            )
        return min(size_bytes, full_bytes)
    return min(_LARGEST, room)


def run_tuning(
    tuning: Tuning, journal: Journal, progress: TuningProgress, *, began_s: float
) -> Outcome:
    """Run or resume `tuning`: trials in the journal are not measured again.

    A complete journal has them all: nothing is measured, and the target is not written to.
    `began_s`, of time.perf_counter, is when its time began to count. Nothing stays in the target,
    however it ends.
    """
    recorded = deque(journal.trials)

    def known(candidate: Candidate, step: Step) -> Measurement:
        if not recorded or not recorded[0].answers(candidate, step):
            raise ResultFileError(
                f"{journal.path} does not fit this iobench {__version__} or this machine's "
                f"writers (it was written by {journal.header.iobench}); start anew"
            )
        return recorded.popleft().measured

    if journal.complete:
        return tuning.tuner(known, progress).run()
    with tuning.runner().running(began_s) as runner:

        def measure(candidate: Candidate, step: Step) -> Measurement:
            if recorded:
                return known(candidate, step)
            measured = runner(candidate, step)
            journal.write(TrialRecord.of(candidate, step, measured))
            return measured

        return tuning.tuner(measure, progress).run()


def emit(outcome: Outcome, tuning: Tuning, header: TuningRecord) -> str:
    """Return the text of the file from which `iobench.load_writer` makes the tuned writer."""
    tuned = _tuned(outcome, tuning, header)
    return dump_writer(
        outcome.chosen.make(),
        tuned,
        file_format=_format(tuning),
        comment=_comment(outcome, tuned),
    )


def _tuned(outcome: Outcome, tuning: Tuning, header: TuningRecord) -> Tuned:
    chosen, *_ = outcome.standings()
    size = tuning.actual_bytes(outcome.size_bytes)
    show = outcome.race.objective.show
    over = outcome.verdict.over_baseline
    interval = chosen.interval
    runner_up = outcome.runner_up
    name = chosen.candidate.label
    lead = outcome.confirmation.compare(name, runner_up) if runner_up else None
    return Tuned(
        date=header.started_at,
        iobench=header.iobench,
        workload=f"{tuning.workload.name}, rank {tuning.asked.rank}: {format_size(size)} of "
        f"{format_size(tuning.full_bytes)}",
        objective=outcome.race.objective.goal,
        target=tuning.target.location,
        storage=printable(str(header.storage)),
        machine=printable(", ".join(header.machine.words())),
        fingerprint=header.machine.fingerprint or "",
        size_bytes=size,
        samples=chosen.samples,
        median=show(chosen.loss, size),
        interval=f"{show(interval.high, size)} to {show(interval.low, size)}" if interval else "",
        paths=chosen.paths,
        verdict=chosen.verdict.status.value if chosen.verdict else None,
        finding=next(outcome.reasons(), "the only setting that works here"),
        baseline=outcome.baseline,
        ratio=round(over.ratio.ratio, 4) if over else None,
        ratio_interval=(round(over.ratio.interval.low, 4), round(over.ratio.interval.high, 4))
        if over and over.ratio.interval
        else None,
        runner_up=runner_up,
        over_runner_up=round(lead.ratio.ratio, 4) if lead else None,
    )


def _comment(outcome: Outcome, tuned: Tuned) -> Iterator[str]:
    judged = outcome.standings()[0].verdict
    yield f"{outcome.chosen.writer} for {outcome.race.objective.goal} of {tuned.workload}"
    yield f"on {tuned.storage}: {tuned.median}."
    yield f"{tuned.finding}."
    if judged and judged.status in (VerdictStatus.INVALID, VerdictStatus.UNPROVED):
        yield f"The figures are {judged.status}: {judged.reasons[0]}."
    yield f"By iobench autotune, {tuned.date[:10]}. In the trainer:"
    yield '    writer = iobench.load_writer("writer.toml")'


def _format(tuning: Tuning) -> str:
    """Return the format that most of the workload's bytes have."""
    sizes: Counter[str] = Counter()
    for spec in tuning.workload.files(tuning.asked.rank):
        sizes[spec.format] += spec.size_bytes
    return max(sizes, key=lambda name: (sizes[name], name))
