"""`iobench compare`: compare new runs with old ones, and find regressions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iobench.cli.given import ReportFormatOption, Verb, print_warning, read_record
from iobench.cli.pages import Shown
from iobench.errors import IobenchError, RegressionError, UsageError
from iobench.units import parse_percent

if TYPE_CHECKING:
    from iobench.results import ResultFile

_SEPARATOR = "--"
_MARK = "\0"  # no path can contain it


class CompareCommand(Verb):
    """Command whose arguments may contain `--`, which the parser would drop."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [_MARK if one == _SEPARATOR else one for one in args])


SETTINGS = {"cls": CompareCommand}


def compare(
    runs: list[str],
    threshold: str = "5%",
    force: bool = False,
    strict: bool = False,
    format_: ReportFormatOption = "table",
) -> None:
    """Compare runs with earlier ones; exit code 5 on a regression.

    Arguments:
        OLD... -- NEW...: Result files or directories of them: runs before, --, runs now. Two alone
            are one run a side.

    Options:
        --threshold PERCENT: Slower by more than this is a regression.
        --force: Compare runs that are not alike, and list the differences.
        --strict: Exit with 5 for one run a side too.
    """
    from iobench.report import compare as report
    from iobench.report.compare import compare_document

    shown = Shown(form=format_)
    allowed = parse_percent(threshold, "--threshold")
    before, after = (_read(side) for side in _sides(runs))
    old, new = (", ".join(str(one.path) for one in side) for side in (before, after))
    held = [(one.run, one.samples) for one in before]
    if any((one.run, one.samples) in held for one in after):
        raise UsageError(f"{old} and {new}: the same run is on both sides; give two")
    differing = report.unlike_runs(before, after)
    if differing and not force:
        raise UsageError(
            f"{old} and {new} cannot be compared ({'; '.join(differing)}); "
            "--force compares them anyway"
        )
    comparison = report.compare(before, after, allowed)
    if not comparison.rows and not comparison.failed:
        raise UsageError(f"{old} and {new} have no writer in common")
    document = compare_document(comparison, (*before, *after))
    shown.show(document)
    if worse := [f"{row.setting.name} {row.operation}" for row in comparison.regressions]:
        slower = f"slower by more than {threshold}: {', '.join(worse)}"
        if strict or not comparison.one_run_a_side:
            raise RegressionError(slower)
        print_warning(
            f"{slower}; one run a side does not show whether the code did it: give several runs, "
            "or --strict for exit code 5"
        )
    if comparison.spoilt:
        raise IobenchError(
            f"VALID before, INVALID now or FAILED: {', '.join(comparison.spoilt)}; not judged"
        )


def _sides(runs: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Split OLD... -- NEW.... Raises UsageError where a side is empty or the separator missing."""
    if runs.count(_MARK) == 1:
        at = runs.index(_MARK)
        old, new = runs[:at], runs[at + 1 :]
    elif _MARK not in runs and len(runs) == 2:
        old, new = runs[:1], runs[1:]
    else:
        what = "one run is given" if len(runs) == 1 else "-- must be given once, between the sides"
        raise UsageError(f"{what}; write iobench compare OLD NEW, or OLD1 OLD2 -- NEW1 NEW2")
    if not old or not new:
        raise UsageError("each side needs a run: iobench compare OLD1 OLD2 -- NEW1 NEW2")
    return old, new


def _read(paths: Sequence[str]) -> list[ResultFile]:
    """Read files, and .jsonl files of directories in name order. Raises UsageError for none."""
    found = []
    for path in map(Path, paths):
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not files:
            raise UsageError(f"{path} has no result files (*.jsonl)")
        found += [read_record(one) for one in files]
    for result in found:
        if result.training:
            raise UsageError(
                f"{result.path} is a record of iobench train; give records of iobench run"
            )
    repeated = {one.run.run_id for one in found}
    if len(repeated) < len(found):
        raise UsageError(f"{', '.join(paths)}: the same run twice on one side has no spread")
    return found
