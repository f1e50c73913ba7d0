"""Progress on stderr: a bar on a terminal, else one plain line per result."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from iobench.cli import interrupts
from iobench.results import CeilingSample, Failure, Sample, TrainBlock
from iobench.results.setting import at_target
from iobench.text import printable
from iobench.units import format_rate, format_seconds, format_size, in_gib

if TYPE_CHECKING:
    from iobench.tune.objective import Step
    from iobench.tune.space import Candidate

_REFRESH_PER_S = 2  # redrawing takes CPU from what is being timed
_BAR_WIDTH = 12
_ESTIMATE_S = 600  # steps take seconds to minutes: rich looks back 30 s, which may hold none


class _Steps:
    """Shows steps: animated only on a terminal, as lines elsewhere, and not at all if quiet.

    Every step and every line raises KeyboardInterrupt if a signal came before.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True)
        self._quiet = quiet
        self._bar: Progress | None = None
        self._begun = False

    def begin(self, steps: int | None) -> None:
        """Show a bar of `steps`; the time alone if their number is not known."""
        if self._quiet or not self._console.is_terminal:
            return
        columns: tuple[ProgressColumn, ...] = (TimeElapsedColumn(),)
        if steps is not None:
            columns = (
                BarColumn(bar_width=_BAR_WIDTH),
                TextColumn("{task.percentage:3.0f}%"),
                TimeRemainingColumn(compact=True),
                TextColumn("left"),
            )
        self._bar = Progress(
            *columns,
            TextColumn("{task.description}", table_column=Column(no_wrap=True, ratio=1)),
            TextColumn("{task.fields[last]}"),
            console=self._console,
            expand=True,
            transient=True,
            refresh_per_second=_REFRESH_PER_S,
            speed_estimate_period=_ESTIMATE_S,
        )
        self._bar.start()
        self._task = self._bar.add_task("", total=steps, last="")

    def step(self, what: str) -> None:
        interrupts.check()
        if self._bar:
            done = 1 if self._begun else 0
            task = self._bar.tasks[self._task]
            if task.total is not None and task.completed + done >= task.total:
                # With --repeat auto the number of repetitions is not known before the end.
                self._bar.update(self._task, total=task.completed + done + 1)
            self._bar.update(self._task, description=printable(what), advance=done)
        self._begun = True

    def _line(self, text: str, last: str = "") -> None:
        """Print `text` as a line; on a terminal, show `last` at the end of the bar instead."""
        interrupts.check()
        if self._bar:
            self._bar.update(self._task, last=last)
        elif not self._quiet:
            print(text, file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()


class StderrProgress(_Steps):
    """Shows the steps and results of a run, or the blocks of a training."""

    def result(self, record: Sample | CeilingSample | Failure | TrainBlock) -> None:
        if isinstance(record, TrainBlock):
            each = f"{format_seconds(record.wall_s / len(record.step_s))} a step"
            label, wall = f"{record.writer} {record.how}".strip(), format_seconds(record.wall_s)
            self._line(f"{record.repetition + 1} {label}: {wall}, {each}", f"last {each}")
            return
        if isinstance(record, CeilingSample):
            writer = at_target(f"fio {record.job['name']}", record.target)
        else:
            writer = record.setting.name
        last = "failed"
        if isinstance(record, Failure) or (isinstance(record, CeilingSample) and record.error):
            figure = printable(record.error or "")
        else:
            rate = record.bytes / record.elapsed_s
            figure = f"{format_rate(rate)}, {format_seconds(record.elapsed_s)}"
            last = f"last {in_gib(rate)} GiB/s"
        self._line(f"{record.repetition + 1} {writer} {record.operation}: {figure}", last)


class TuneProgress(_Steps):
    """Shows the trials of `iobench autotune`: one changing line on a terminal, else a line each."""

    def phase(self, what: str) -> None:
        self._phase = what
        if self._bar is None:
            self.begin(None)
        if self._bar is None:
            self._line(what)

    def trial(self, candidate: Candidate, step: Step, figure: str) -> None:
        if self._bar:
            self._bar.update(self._task, description=f"{self._phase}: {candidate.label}")
        self._line(f"{step.round} {candidate.label}: {figure}", figure)


class VerifyProgress(_Steps):
    """Shows how much `iobench verify` has read of a path."""

    def __init__(self, path: str, *, quiet: bool = False) -> None:
        super().__init__(quiet=quiet)
        self._path = path

    def read(self, done_bytes: int, total_bytes: int) -> None:
        interrupts.check()
        if self._bar is None:
            self.begin(total_bytes)
        if self._bar:
            last = f"{format_size(done_bytes)} of {format_size(total_bytes)}"
            self._bar.update(
                self._task,
                completed=done_bytes,
                total=total_bytes,
                description=printable(self._path),
                last=last,
            )
