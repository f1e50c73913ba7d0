"""The tables and outputs in README.md and docs/, made from the records that they name.

    python benchmarks/tables.py              rewrite every marked block and picture
    python benchmarks/tables.py RECORD...    print the table of a record of `--record`

A marked block is the text between two such lines; the first names the table and its arguments:

    <!-- table: rates save results/reference-peers-llama7b.jsonl -->
    <!-- end -->

`<!-- output: 18 iobench show ... -->` is the first 18 lines that the command prints on a terminal
of 80 columns; `<!-- picture: iobench show RECORD -o FILE -->` shows the picture that the
command makes. A test makes every block and picture again and compares. `<!-- rooms: iobench -->`
is the files and lines of each part of the package, and stays while they are within 5%;
`<!-- api: ### MODULE -->` is what a module exports, under such headings (api_pages.py).
"""

from __future__ import annotations

import html
import io
import json
import math
import os
import re
import shlex
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import record as benchmark
from api_pages import page_of

from iobench.bench.judging.ceiling import ABOVE_FIO
from iobench.cli.verbs import app_of
from iobench.errors import ResultFileError
from iobench.report.kinds import document_of
from iobench.report.page.theme import DARK, SCHEME
from iobench.report.row import Summary
from iobench.report.summary import summarise
from iobench.results import ResultFile, TrainBlock, read
from iobench.results.setting import labels
from iobench.stats.comparison import noise_floor
from iobench.train.costs import TrainingCost, training_costs
from iobench.units import GIB, MIB, format_seconds, format_size

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCK = re.compile(
    r"(<!-- (table|output|picture|rooms|api): (.*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL
)
_WIDTH = 116

Row = Sequence[str]


def rendered(page: Path) -> str:
    """The page with all its marked blocks made again."""

    def again(found: re.Match[str]) -> str:
        begin, kind, arguments, before, end = found.groups()
        if kind == "rooms":
            return begin + _rooms(ROOT / arguments, before) + end
        if kind == "api":
            return f"{begin}\n{page_of(*arguments.split())}{end}"
        return begin + _block(kind, shlex.split(arguments), page) + end

    return BLOCK.sub(again, page.read_text(encoding="utf-8"))


def _block(kind: str, arguments: Sequence[str], page: Path) -> str:
    if kind == "output":
        return _output(int(arguments[0]), arguments[1:])
    if kind == "picture":
        return _picture(arguments)
    name, *rest = arguments
    path = rest.pop()
    if name == "records":
        return records(ROOT / path, page)
    up = os.path.relpath(ROOT, page.parent)
    link = f"[{Path(path).name}]({path if up == '.' else f'{up}/{path}'})"
    return TABLES[name](ROOT / path, *rest) + "\n" + _source(ROOT / path, link)


# Tables: each is a function of the record's path and of further words of the marker.


def rates(path: Path, operation: str) -> str:
    """A row per contender, the fastest first."""
    report = summarise(read(path))
    shown = [one for one in report.summaries if one.operation == operation]
    baseline = str(report.baseline["name"]) if report.baseline else ""
    with_fio = any(one.of_ceiling is not None for one in shown)
    jobs = any(one.axes.numjobs != 1 for one in shown)
    head = [operation, "GiB/s", "interval"]
    head += [f"times `{baseline}`"] * bool(baseline) + ["of fio"] * with_fio
    memory = any(one.memory and one.memory.total_bytes is not None for one in shown)
    head += ["first done", "last done"] * jobs + ["CPU s/GiB"] + ["memory"] * memory
    rows = []
    for name, one in zip(labels(one.setting for one in shown), shown, strict=True):
        row = [f"`{name}`", f"{one.median_bytes_per_s / GIB:.2f}", _interval(one)]
        row += [_times(one)] * bool(baseline)
        row += ["-" if one.of_ceiling is None else f"{one.of_ceiling:.0%}"] * with_fio
        row += [f"{one.first_done_s:.2f} s", f"{one.last_done_s:.2f} s"] * jobs
        row += [f"{one.cpu_s_per_gib:.2f}"]
        rows.append(row + [_memory(one)] * memory)
    return _table(head, rows) + _above_fio(shown)


def _above_fio(shown: Sequence[Summary]) -> str:
    """What may explain each rate of more than 105% of fio's."""
    names: dict[str, list[str]] = {}
    for name, one in zip(labels(one.setting for one in shown), shown, strict=True):
        for reason in one.reasons:
            if reason.startswith(ABOVE_FIO):
                names.setdefault(reason.removeprefix(ABOVE_FIO), []).append(f"`{name}`")
    lines = (f"Above fio ({', '.join(who)}): {why}." for why, who in names.items())
    return "".join("\n" + "\n".join(textwrap.wrap(line, _WIDTH)) + "\n" for line in lines)


def _memory(one: Summary) -> str:
    total = one.memory.total_bytes if one.memory else None
    return "-" if total is None else format_size(total)


def _interval(one: Summary) -> str:
    if one.ci95_bytes_per_s is None:
        return "-"
    low, high = one.ci95_bytes_per_s
    return f"{low / GIB:.2f} - {high / GIB:.2f}"


def _times(one: Summary) -> str:
    if one.ratio is None:
        return "-"
    if one.ratio_ci95 is None:
        return f"{one.ratio:.2f}"
    return f"{one.ratio:.2f} ({one.ratio_ci95[0]:.2f} - {one.ratio_ci95[1]:.2f})"


def noise(path: Path) -> str:
    """How far one writer differs from itself."""
    result, rows = read(path), []
    for one in summarise(result).summaries:
        floor = noise_floor(same for same in result.samples if same.operation == one.operation)
        if floor is not None:
            rate = f"{one.median_bytes_per_s / GIB:.2f}"
            rows.append([one.operation, rate, _interval(one), f"{floor:.1%}"])
    return _table(["", "GiB/s", "interval", "noise floor"], rows)


def training(path: Path) -> str:
    """What checkpoints cost a training loop, an arm a row."""
    result = read(path)
    costs = [one for one in training_costs(result) if one.mode != "none"]
    stock = next((one for one in costs if one.writer.startswith("peer:")), None)
    head = ["checkpoints", "stall", "steps while persisting", "persist", "overhead", "interval"]
    rows = [
        [
            f"`{one.label}`",
            format_seconds(one.stall_s or 0.0),
            "-" if one.slowdown is None else f"{one.slowdown:+.1%}",
            "-" if one.persist_s is None else format_seconds(one.persist_s),
            "-" if one.overhead is None else f"{one.overhead:+.1%}",
            "-"
            if one.overhead_ci95 is None
            else f"{one.overhead_ci95.low:+.1%} to {one.overhead_ci95.high:+.1%}",
            *([_of_stock(result, one, stock)] if stock else []),
        ]
        for one in costs
    ]
    return _table([*head, *([f"of `{stock.label}`"] if stock else [])], rows)


def _of_stock(result: ResultFile, one: TrainingCost, stock: TrainingCost) -> str:
    """The overhead as a part of stock's in the same repetition; the median of these."""
    if one is stock:
        return "-"
    own, other, plain = (
        {block.repetition: block.wall_s for block in result.training if of(block)}
        for of in (_arm(one), _arm(stock), lambda block: block.mode == "none")
    )
    parts = [(own[turn] - plain[turn]) / (other[turn] - plain[turn]) for turn in plain]
    return f"{statistics.median(parts):.2f}"


def _arm(one: TrainingCost) -> Callable[[TrainBlock], bool]:
    return lambda block: (
        (block.writer, block.mode, block.slots)
        == (
            one.writer,
            one.mode,
            one.slots,
        )
    )


def arms(path: Path, only: str = "") -> str:
    """The record of a benchmark script, an arm a row; `only` those whose name matches."""
    found = {name: of for name, of in benchmark.read(path).arms.items() if re.search(only, name)}
    with_rate = all("bytes" in one or "files" in one for of in found.values() for one in of)
    with_cpu = all("cpu_s" in one and "bytes" in one for of in found.values() for one in of)
    removes = any("removal_s" in one for of in found.values() for one in of)
    head = ["arm", *["rate", "slowest - fastest"] * with_rate, "median time", "rounds"]
    head += ["CPU s/GiB"] * with_cpu + ["removal"] * removes
    rows = []
    for name, samples in sorted(found.items(), key=_rank):
        row = [name, *(_rates(samples) if with_rate else [])]
        row += [f"{statistics.median(one['elapsed_s'] for one in samples):.3f} s"]
        row += [str(len(samples))]
        if with_cpu:
            cpu_s = statistics.median(one["cpu_s"] / (one["bytes"] / GIB) for one in samples)
            row.append(f"{cpu_s:.2f}")
        if removes:
            row.append(f"{statistics.median(one['removal_s'] for one in samples):.3f} s")
        rows.append(row)
    return _table(head, rows)


def shapes(path: Path, only: str = "") -> str:
    """The record of shapes.py, an arm and a number of tensors a row; `only` those that match."""
    found = benchmark.read(path).arms
    return shape_table({name: of for name, of in found.items() if re.search(only, name)})


def shape_table(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """By operation and number of tensors, the quickest first; figures are medians."""

    def rank(arm: tuple[str, Sequence[Mapping[str, Any]]]) -> tuple[str, int, float]:
        operation, elapsed_s = _rank(arm)
        return operation, arm[1][0]["tensors"], elapsed_s

    rows = []
    for name, samples in sorted(found.items(), key=rank):
        count, size = samples[0]["tensors"], samples[0]["bytes"]
        elapsed_s = statistics.median(one["elapsed_s"] for one in samples)
        per_tensor = [
            statistics.median(one[key] for one in samples) / count * 1e6
            for key in ("elapsed_s", "cpu_s", "caller_cpu_s")
        ]
        rate = f"{size / elapsed_s / MIB:.0f}"
        row = [f"{count:,}", name.rpartition(",")[0], rate, *(f"{us:.1f}" for us in per_tensor)]
        rows.append([*row, str(len(samples))])
    head = ["arm", "MiB/s", "us/tensor", "CPU us/tensor", "CPU us/tensor, caller", "rounds"]
    return _table(["tensors", *head], rows)


def _rank(arm: tuple[str, Sequence[Mapping[str, Any]]]) -> tuple[str, float]:
    """By the operation, which is an arm's first word; then the quickest first."""
    name, samples = arm
    return name.split()[0], statistics.median(one["elapsed_s"] for one in samples)


def _rates(samples: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    files = "files" in samples[0]
    key, unit, digits = ("files", 1, 0) if files else ("bytes", GIB, 2)
    each = sorted(one[key] / one["elapsed_s"] / unit for one in samples)
    noun = "files/s" if files else "GiB/s"
    middle = statistics.median(each)
    return f"{middle:.{digits}f} {noun}", f"{each[0]:.{digits}f} - {each[-1]:.{digits}f}"


TABLES: Mapping[str, Callable[..., str]] = {
    "rates": rates,
    "noise": noise,
    "training": training,
    "arms": arms,
    "shapes": shapes,
}


def _table(head: Row, rows: Iterable[Row]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(map(_row, lines))


def _row(cells: Row) -> str:
    return f"| {' | '.join(cells)} |\n"


def records(directory: Path, page: Path) -> str:
    """A row per reference record in `directory`: when, and by which command.

    Other records there are somebody's own, with the paths of a machine in their commands.
    """
    rows = []
    for path in sorted(directory.glob("reference-*.jsonl")):
        with path.open(encoding="utf-8") as file:
            first = json.loads(file.readline())
        command = shlex.join(_asked(_asked(first["command"], "-o"), "--target"))
        link = f"[`{path.stem.removeprefix('reference-')}`]({os.path.relpath(path, page.parent)})"
        rows.append([link, first["started_at"][:10], f"`{command}`"])
    return "".join(["| record | date | command |\n", "|---|---|---|\n", *map(_row, rows)])


# The text below a table: when, where and how it was measured.


def _source(path: Path, link: str) -> str:
    started_at, environment, command, what = _origin(path)
    lines = textwrap.wrap(f"{what}{started_at[:10]}, {_machine(environment)}.", _WIDTH)
    if command[0] == "python" and not (ROOT / command[1]).exists():
        script = Path(command[1]).name
        return "\n".join([*lines, f"Record: {link}, by `{script}`, which was removed since.", ""])
    return "\n".join([*lines, f"Record: {link}.", "", "```sh", *_shell(command), "```", ""])


def _origin(path: Path) -> tuple[str, Mapping[str, Any], Sequence[str], str]:
    """When, where and by which command it was recorded, and what was moved."""
    try:
        run = read(path).run
    except ResultFileError:
        header = benchmark.read(path).header
        environment, command = header["environment"], header["command"]
        return header["started_at"], environment, _asked(command, "--record"), ""
    facts = {"machine": run.environment.machine, "storage": run.environment.storage}
    size = f"{run.workload.name}, {format_size(run.workload.bytes)}; "
    return run.started_at, facts, _asked(run.command, "-o"), size


def _asked(command: Sequence[str], option: str) -> Sequence[str]:
    """The command without where its record went, with the present name of --no-fio."""
    command = ["--no-fio" if one == "--no-ceiling" else one for one in command]
    if option not in command:
        return command
    at = command.index(option)
    return [*command[:at], *command[at + 2 :]]


def _machine(environment: Mapping[str, Any]) -> str:
    machine, storage = environment["machine"], environment["storage"]
    memory = machine["memory"]["total_bytes"] / GIB
    disk = (storage.get("device") or {}).get("type") or "no disk of its own"
    return (
        f"{machine['cpu']['model']} with {machine['cpu']['usable_cpus']} cores, {memory:.0f} GiB, "
        f"Linux {machine['kernel_version']}, {storage['fs_type']} on {disk}"
    )


def _shell(command: Sequence[str]) -> Iterator[str]:
    """The command, with a backslash where a line would be too long: after a space or a comma."""
    text = shlex.join(command)
    while len(text) > _WIDTH:
        cut = max(text.rfind(between, 0, _WIDTH - 1) for between in " ,") + 1
        yield text[:cut] + "\\"
        text = text[cut:]
    yield text


def _rooms(package: Path, before: str) -> str:
    """Files and lines of each part, the largest first; `before` where that is still right."""
    files: dict[str, list[int]] = {}
    for path in package.rglob("*.py"):
        part = path.relative_to(package).parts[0]
        lines = len(path.read_text(encoding="utf-8").splitlines())
        files.setdefault(part if part.isidentifier() else "(modules)", []).append(lines)
    sizes = {part: (len(one), sum(one)) for part, one in files.items()}
    sizes["all"] = (sum(count for count, _ in sizes.values()), sum(n for _, n in sizes.values()))
    shown = re.findall(r"^\| `?([\w()]+)`? \| (\d+) \| ([\d,]+) \|$", before, re.MULTILINE)
    known = {part: (int(count), int(lines.replace(",", ""))) for part, count, lines in shown}
    if known.keys() == sizes.keys() and all(
        math.isclose(one, other, rel_tol=0.05, abs_tol=3)
        for part, size in sizes.items()
        for one, other in zip(size, known[part], strict=True)
    ):
        return before
    rows = [
        [f"`{part}`" if part.isidentifier() and part != "all" else part, str(count), f"{lines:,}"]
        for part, (count, lines) in sorted(sizes.items(), key=lambda one: -one[1][1])
    ]
    return _table(["part", "files", "lines"], [*rows[1:], rows[0]])


def _output(lines: int, command: Sequence[str]) -> str:
    """The first `lines` lines that `iobench ...` prints on a terminal of 80 columns."""
    terminal = _Terminal()
    plain = {"COLUMNS": "80", "LINES": "40", "TERM": "dumb", "NO_COLOR": "1"}
    with chdir(ROOT), mock.patch.dict(os.environ, plain), redirect_stdout(terminal):
        app_of()(list(command[1:]), standalone_mode=False)
    shown = terminal.getvalue().splitlines()[:lines]
    return "\n".join(["```text", f"$ {shlex.join(command)}", *shown, "```", ""])


def _picture(command: Sequence[str]) -> str:
    """The picture for each colour scheme, with the chart's text for those who cannot see it."""
    (record,) = [ROOT / one for one in command if one.endswith(".jsonl")]
    chart, *_ = document_of([record]).charts.values()
    dark, name = _dark(command[-1]), command[-1]
    return (
        f'<picture>\n<source media="(prefers-color-scheme: dark)" srcset="{dark}">\n'
        f'<img alt="{html.escape(chart.alt)}" src="{name}">\n</picture>\n'
    )


def _dark(name: str) -> str:
    return name.removesuffix(".svg") + "-dark.svg"


def draw(directory: Path) -> list[Path]:
    """Make the pictures of all pages by their commands, in `directory` instead of here."""
    drawn = []
    for page in PAGES:
        for _, kind, arguments, *_ in BLOCK.findall(page.read_text(encoding="utf-8")):
            if kind == "picture":
                *command, name = shlex.split(arguments)
                drawn.append(Path(name))
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                with chdir(ROOT):
                    app_of()([*command[1:], str(directory / name)], standalone_mode=False)
                text = (directory / name).read_text(encoding="utf-8")
                for colour, ours in SCHEME.items():
                    text = text.replace(f'"{ours}"', f'"{DARK[colour]}"')
                (directory / _dark(name)).write_text(text, encoding="utf-8")
    return drawn


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        table = shapes if benchmark.read(path).header["name"] == "shapes" else arms
        print(table(path) + "\n" + _source(path.resolve(), str(path)))
    if len(sys.argv) == 1:
        draw(ROOT)
        for page in PAGES:
            if (text := rendered(page)) != page.read_text(encoding="utf-8"):
                page.write_text(text, encoding="utf-8")
                print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
