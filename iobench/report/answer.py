"""The answer of a report: the fastest target and I/O path, their leads, how sure, what to do next.

`answer` returns it in a few lines, which the terminal table prints first.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from iobench import workloads
from iobench.bench.judging.ceiling import ABOVE_FIO
from iobench.bench.judging.rules import NO_CLAIM
from iobench.report.document import Line
from iobench.report.summary import NOT_STEADY, Report
from iobench.report.winners import RANKED, Summary, Winner, can_win
from iobench.results.setting import at_target
from iobench.stats.comparison import LEAST_SAMPLES
from iobench.stats.over_time import OverTime, RateChange
from iobench.units import count_of, format_rate, format_seconds, format_size, in_gib

_MOST_NAMES = 4
_IDLE = 0.3  # of the time: the device is not what limits
_GPUS_PER_NODE = 8


def answer(report: Report) -> list[Line]:
    """Return the lines Stopped, Rules, Target, Save, Restore, Over time, Background, Next, Noise.

    Empty ones are left out. Next to a background process the fastest one may be another: Save and
    Restore are about the operations without it, if there are any.
    """
    lines = [Line("Stopped", (report.stopped or "",), caveat=True)]
    lines.append(Line("Rules", tuple(_rules(report))))
    lines.append(Line("Target", tuple(_target(one) for one in report.target_winners)))
    alone = [one for one in report.summaries if one.axes.background is None] or report.summaries
    for kind in dict.fromkeys((one.operation, one.axes.restore_as) for one in alone):
        rows = [one for one in alone if (one.operation, one.axes.restore_as) == kind]
        subject = " ".join(part for part in (kind[0].capitalize(), kind[1]) if part)
        texts = [*_operation(report, rows), *_not_counted(rows)] if not report.targets else []
        for target in report.targets:
            texts += _there(report, target, [one for one in rows if one.axes.target == target])
        lines.append(Line(subject, tuple(texts)))
    lasted = [text for one in report.summaries for text in _over_time(one)]
    lines.append(Line("Over time", tuple(lasted)))
    lines.append(Line("Background", tuple(map(_background, report.summaries))))
    lines.append(Line("Next", tuple(_next(report)), commands=True))
    lines.append(Line("Noise", tuple(_noise(report)), caveat=True))
    return [replace(line, texts=kept) for line in lines if (kept := (*filter(None, line.texts),))]


def _rules(report: Report) -> Iterator[str]:
    rules = report.rules
    if rules is not None:
        kept = f"not kept: {'; '.join(rules.not_kept)}" if rules.not_kept else "kept"
        yield f"{rules.title}: {kept}; {NO_CLAIM}"


def _background(one: Summary) -> str:
    if one.background_rates is None or one.verdict not in RANKED:
        return ""
    does = " ".join(filter(None, [f"{one.operation}s", one.axes.restore_as]))
    name = one.label.replace(f" background={one.axes.background}", "")
    got = in_gib(one.background_rates.median_bytes_per_s)
    text = f"{name} {does} at {_rate(one)} while another process restores at {got} GiB/s"
    if one.background_rates.kept is None:
        return text
    text += f", and keeps {100 * one.background_rates.kept:.0f}% of its rate alone"
    if one.background_rates.kept_ci95 is not None and one.samples >= LEAST_SAMPLES:
        low, high = one.background_rates.kept_ci95
        text += f" ({100 * low:.0f}% to {100 * high:.0f}%)"
    return text


def _target(winner: Winner) -> str:
    """Return which target is faster: `/mnt/b saves 1.9x faster than /mnt/a`."""
    does = " ".join(part for part in (f"{winner.operation}s", winner.restore_as) if part)
    if winner.repetitions < LEAST_SAMPLES:
        few = count_of(winner.repetitions, "sample")
        return f"{few} cannot name the faster one; highest median: {winner.fastest} {does}"
    names = [winner.fastest, *winner.equals]
    who = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]} (undecided)"
    return f"{who} {does} {next(_faster(winner), 'faster')}"


def _there(report: Report, target: str, rows: Sequence[Summary]) -> Iterator[str]:
    """Yield the answer about one of several targets, without its name in the labels."""
    if not rows:
        return
    texts = (*_operation(report, rows), *_not_counted(rows))
    first, *others = (text.replace(at_target("", target), "") for text in texts)
    yield f"{target}: {first}"
    yield from others


def _operation(report: Report, rows: Sequence[Summary]) -> Iterator[str]:
    ranked = can_win(rows)
    if not ranked:
        yield f"no valid figure: {', '.join(f'{one.label} is {one.verdict}' for one in rows)}"
        return
    which = *ranked[0].kind, ranked[0].axes.target
    winner = next((one for one in report.winners if (*one.kind, one.target) == which), None)
    if winner is None:
        best = ranked[0]
        yield ", ".join([f"{best.label} at {_rate(best)}", *_of_fio(best)])
        yield from _seconds(report, best, None)
        return
    best = next(one for one in ranked if one.label == winner.fastest)
    if len(ranked) > 1 and winner.repetitions < LEAST_SAMPLES:
        few = count_of(winner.repetitions, "sample")
        yield f"{few} cannot name a winner; highest median: {best.label} at {_rate(best)}"
        return
    slower = next((one for one in ranked if one.label == winner.reference), None)
    lead = [f"{best.label} {text}" if winner.equals else text for text in _faster(winner)]
    who = _who(winner, len(ranked))
    if not lead and winner.equals:
        lead = [f"highest median: {best.label} at {_rate(best)}"]
    elif not lead:
        who += f" at {_rate(best)}"
    yield ", ".join([who, *lead, *_of_fio(best)])
    yield from _idle(slower)
    ratio = winner.ratio if slower and slower.axes.numjobs == best.axes.numjobs else None
    yield from _seconds(report, best, ratio)


def _idle(slower: Summary | None) -> Iterator[str]:
    """Yield what limits the writer that the best one is compared with, where it is not the device.

    A save through the page cache may wait for the kernel to make pages, most of its time.
    """
    if slower is not None and (slower.device_idle or 0.0) >= _IDLE:
        yield (
            f"{slower.label}: the device was idle {100 * (slower.device_idle or 0.0):.0f}% of the "
            f"time, {slower.cpu_s_per_gib:.1f} CPU s/GiB"
        )


def _not_counted(rows: Sequence[Summary]) -> Iterator[str]:
    ranked = can_win(rows)
    bad = [f"{one.label} ({one.verdict})" for one in rows if one not in ranked]
    if 0 < len(bad) < len(rows):
        yield f"not counted: {', '.join(bad)}"


def _who(winner: Winner, ranked: int) -> str:
    """Return the fastest of `ranked` contenders, and those from which it cannot be told apart."""
    names = [winner.fastest, *winner.equals]
    if len(names) == 1:
        return names[0]
    many = len(names) > _MOST_NAMES
    last = f"{len(names) - _MOST_NAMES} more" if many else names[-1]
    either = f"{', '.join(names[:_MOST_NAMES] if many else names[:-1])} or {last}"
    if 2 * len(names) > ranked > 2:
        apart = f"no winner: {len(names)} of {ranked} cannot be told apart"
        return apart if many else f"{apart} ({either})"
    return f"{either} (undecided)"


def _faster(winner: Winner) -> Iterator[str]:
    """Yield the lead with its interval: `5.6x faster than buffered (3.7x to 7.0x)`."""
    if winner.ratio is None:
        return
    digits = 0 if winner.ratio >= 9.95 else 1 if winner.ratio >= 1.95 else 2
    text = f"{winner.ratio:.{digits}f}x faster than {winner.reference}"
    if winner.ratio_ci95 is not None:
        low, high = winner.ratio_ci95
        text += f" ({low:.{digits}f}x to {high:.{digits}f}x)"
    yield text


def _of_fio(best: Summary) -> Iterator[str]:
    if best.of_ceiling is not None:
        why = next((one for one in best.reasons if one.startswith(ABOVE_FIO)), None)
        yield f"{100 * best.of_ceiling:.0f}% of fio" + (
            f" ({why.removeprefix(ABOVE_FIO)})" if why else ""
        )


def _seconds(report: Report, best: Summary, ratio: float | None) -> Iterator[str]:
    """Yield how long the whole checkpoint takes, and how long by what is `ratio` times slower."""
    workload = report.workload
    factor = workload.full_bytes / workload.bytes if workload.bytes else 1.0
    own_s, size = factor * best.bytes / best.median_bytes_per_s, format_size(factor * best.bytes)
    text = f"{size}: {format_seconds(own_s)}"
    # More processes move more bytes: their times are of different checkpoints.
    if ratio is not None:
        text += f" instead of {format_seconds(own_s * ratio)}"
    if workload.scaled:
        text += f", extrapolated from {format_size(best.bytes)}"
        text += ", not steady" if _is_moving(best) else ""
    yield text


def _is_moving(one: Summary) -> bool:
    return any(text.startswith(NOT_STEADY) for text in one.reasons)


def _noise(report: Report) -> Iterator[str]:
    series = [one for one in report.summaries if one.verdict in RANKED]
    moving = [one for one in series if _is_moving(one)]
    if moving:
        are = "is" if len(moving) == 1 else "are"
        lasted = any(one.over_time for one in report.summaries)
        what = "a longer --duration" if lasted else "--until steady, not more repetitions"
        yield (
            f"{len(moving)} of {len(series)} series {are} not steady: let the storage rest, or "
            f"find the rate that lasts by {what}"
        )
    floors: dict[str, list[str]] = {}
    for one in report.winners:
        if one.by_aa is not None:
            floors.setdefault(one.by_aa, []).append(f"{100 * one.floor:.1f}% of {one.what}")
    for source, parts in floors.items():
        yield f"differences up to {', '.join(parts)} are noise, by {source}"


def _next(report: Report) -> Iterator[str]:
    """Yield the next commands, without those for which the report lacks data."""
    workload, target = report.workload, report.target or ""
    name = "" if workload.fingerprint else workload.name  # a directory may have any name
    ranked = [one for one in report.summaries if one.verdict in RANKED]
    # The command of a run over ranks begins with a launcher's, which the record does not have.
    if report.world is None and name in workloads.names() and target.startswith("/") and ranked:
        winners = (*report.winners, *report.target_winners)
        if any(one.repetitions < LEAST_SAMPLES for one in winners):
            yield f"iobench run {name}{_option(target)} --repeat {LEAST_SAMPLES + 1}"
        elif len(ranked) > 1:
            fastest = [one.fastest for one in report.target_winners]
            yield f"iobench autotune {name}{_option(*fastest[:1] or [target])}"
    if report.record and {one.operation for one in ranked} == {"save", "restore"}:
        yield f"iobench plan --results {shlex.quote(report.record)} --nodes {_nodes(name)}"


def _nodes(workload: str) -> int:
    """Return the nodes of a job of the workload: one rank on each GPU."""
    known = workload in workloads.names()
    return max(1, workloads.load(workload).world_size // _GPUS_PER_NODE) if known else 1


def _option(target: str) -> str:
    """Return the option that names the target; empty for the current directory."""
    return "" if Path(target) == Path.cwd() else f" --target {shlex.quote(target)}"


def _rate(one: Summary) -> str:
    return f"{in_gib(one.median_bytes_per_s)} GiB/s"


def _over_time(one: Summary) -> Iterator[str]:
    """Yield lines about the saves of a contender; none where they do not follow each other, or
    where its figure does not count."""
    over_time = one.over_time
    if over_time is None or one.verdict not in RANKED:
        return
    whole = format_seconds(over_time.elapsed_s)
    if over_time.change is None:
        yield f"{one.label}: no change seen in {whole}, {format_rate(one.median_bytes_per_s)}"
    else:
        yield from _change(one.label, over_time.change)
    yield f"{_steady(over_time)}; saves took {100 * over_time.saving:.0f}% of {whole}"


def _change(label: str, change: RateChange) -> Iterator[str]:
    before, after = format_rate(change.before_bytes_per_s), format_rate(change.after_bytes_per_s)
    yield f"{label}: {before} for {format_seconds(change.at_s)}, then {after}"
    low, high = map(format_seconds, change.at_s_ci95)
    yield f"the change is between {low} and {high}, after {format_size(change.written_bytes)}"


def _steady(over_time: OverTime) -> str:
    rounds = f"rounds of {format_seconds(over_time.round_s)}"
    if over_time.range is None or over_time.slope is None:
        return f"not known to be steady: {over_time.rounds} of 5 {rounds}"
    moved = f"range {100 * over_time.range:.0f}%, drift {100 * over_time.slope:.0f}%"
    state = "steady" if over_time.steady else "not steady"
    return f"{state} in the last 5 {rounds} ({moved})"
