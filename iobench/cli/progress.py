"""Progress on stderr: a bar on a terminal, a plain line per result elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from iobench.results import CeilingSample, Failure, Sample, TrainBlock
from iobench.text import printable
from iobench.units import format_rate, format_seconds

if TYPE_CHECKING:
    from iobench.tune.candidate import Candidate
    from iobench.tune.measurement import Step

__all__ = ["StderrProgress", "TrainProgress", "TuneProgress"]

_REFRESH_PER_S = 2  # redrawing takes CPU from what is being timed


class _Steps:
    """Shows steps. Nothing is animated when stderr is not a terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._begun = False

    def begin(self, steps: int) -> None:
        if not self._console.is_terminal:
            return
        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            transient=True,
            refresh_per_second=_REFRESH_PER_S,
        )
        self._bar.start()
        self._task = self._bar.add_task("", total=steps)

    def _spin(self) -> None:
        """As `begin`, for what has no known number of steps."""
        if not self._console.is_terminal:
            return
        self._bar = Progress(
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            transient=True,
            refresh_per_second=_REFRESH_PER_S,
        )
        self._bar.start()
        self._task = self._bar.add_task("")

    def step(self, what: str) -> None:
        if self._bar:
            self._bar.update(self._task, description=what, advance=1 if self._begun else 0)
        self._begun = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()


class StderrProgress(_Steps):
    """Shows a run's steps and results."""

    def result(self, record: Sample | CeilingSample | Failure) -> None:
        if self._bar:
            return
        if isinstance(record, CeilingSample):
            writer = f"fio {record.job['name']}"
        else:
            writer = record.setting.name
        if isinstance(record, Failure) or (isinstance(record, CeilingSample) and record.error):
            figure = printable(record.error or "")
        else:
            rate = format_rate(record.bytes / record.elapsed_s)
            figure = f"{rate}, {format_seconds(record.elapsed_s)}"
        print(
            f"{record.repetition + 1} {writer} {record.operation}: {figure}",
            file=sys.stderr,
            flush=True,
        )


class TuneProgress(_Steps):
    """Shows the trials of `iobench autotune`: one moving line on a terminal, else a line each."""

    def phase(self, what: str) -> None:
        self._phase = what
        if self._bar is None:
            self._spin()
        if not self._bar:
            print(what, file=sys.stderr, flush=True)

    def trial(self, candidate: Candidate, step: Step, figure: str) -> None:
        if self._bar:
            self._bar.update(self._task, description=f"{self._phase}: {candidate.label}, {figure}")
            return
        print(f"{step.round} {candidate.label}: {figure}", file=sys.stderr, flush=True)


class TrainProgress(_Steps):
    """Shows the blocks of `iobench train`."""

    def block(self, label: str, block: TrainBlock) -> None:
        if self._bar:
            return
        each = format_seconds(block.wall_s / len(block.step_s))
        print(
            f"{block.repetition + 1} {label}: {format_seconds(block.wall_s)}, {each} a step",
            file=sys.stderr,
            flush=True,
        )
