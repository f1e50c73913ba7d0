"""The tables and outputs in README.md and docs/, made from the records that they name.

    python benchmarks/tables.py              rewrite every marked block and picture
    python benchmarks/tables.py RECORD...    print the table of a record of `--record`

A marked block is the text between two such lines; the first names the table and its arguments:

    <!-- table: show save results/reference-peers-llama7b.jsonl -->
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
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, redirect_stdout
from pathlib import Path
from unittest import mock

import arms
from api_pages import page_of

from iobench.bench.judging.ceiling import ABOVE_FIO
from iobench.claims.claims import study
from iobench.claims.reproduction import judge_records
from iobench.cli.verbs import app_of
from iobench.errors import ResultFileError
from iobench.report.claims import claims_document
from iobench.report.kinds import document_of
from iobench.report.page.theme import DARK, SCHEME
from iobench.report.render import markdown_table
from iobench.results import Environment, read
from iobench.results.codec import from_plain
from iobench.units import GIB, format_size

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCK = re.compile(
    r"(<!-- (table|output|picture|rooms|api): (.*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL
)
_WIDTH = 116


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
    if name == "claims":
        return claims(path)
    up = os.path.relpath(ROOT, page.parent)
    link = f"[{Path(path).name}]({path if up == '.' else f'{up}/{path}'})"
    return TABLES[name](ROOT / path, *rest) + "\n" + _source(ROOT / path, link)


# Tables: each is a function of the record's path and of a further word of the marker.


def show(path: Path, operation: str = "") -> str:
    """The table of `iobench show`, and what explains rates of more than 105% of fio's; of saves or
    of restores, if an operation is given."""
    document = document_of([path])
    (grid,) = document.tables
    names = [" ".join(one.name.split()).replace(" (s)", ", s") for one in grid.columns]
    if baseline := document.data.get("baseline"):
        names = [name.replace("baseline", f"`{baseline['name']}`") for name in names]
    at = names.index("operation") if "operation" in names else 0
    rows = [row for row in grid.rows if operation in ("", row[at])]
    left_out = _LEFT_OUT | ({"operation"} if operation else set())
    shown = [place for place, name in enumerate(names) if name not in left_out]
    table = arms.markdown(
        [operation or names[0], *(names[place] for place in shown[1:])],
        ([f"`{row[0]}`", *(row[place] for place in shown[1:])] for row in rows),
    )
    notes = (note for note in document.notes if note.startswith(ABOVE_FIO))
    below = ("\n" + "\n".join(textwrap.wrap(note, _WIDTH)) + "\n" for note in notes)
    return "".join((*table, *below))


_LEFT_OUT = {"bytes", "step", "snapshot GiB/s", "peak memory", "peak dirty", "committed"}
"""Columns for which a page is too narrow."""


def samples(path: Path, only: str = "") -> str:
    """The record of a benchmark script, an arm a row; `only` those whose name matches."""
    _, found = arms.read(path)
    return arms.table({name: of for name, of in found.items() if re.search(only, name)})


TABLES: Mapping[str, Callable[..., str]] = {"show": show, "arms": samples}


def claims(name: str) -> str:
    """What `iobench reproduce` says of the reference records of a study."""
    about = study(name)
    found = [read(path) for path in sorted((ROOT / "results").glob(f"reference-{name}-*.jsonl"))]
    (grid,) = claims_document(about, found, judge_records(about, found)).tables
    return "\n".join((*markdown_table(grid), ""))


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
    return "".join(arms.markdown(["record", "date", "command"], rows, "---"))


# The text below a table: when, where and how it was measured.


def _source(path: Path, link: str) -> str:
    started_at, environment, command, what = _origin(path)
    lines = textwrap.wrap(f"{what}{started_at[:10]}, {_machine(environment)}.", _WIDTH)
    if command[0] == "python" and not (ROOT / command[1]).exists():
        script = Path(command[1]).name
        return "\n".join([*lines, f"Record: {link}, by `{script}`, which was removed since.", ""])
    return "\n".join([*lines, f"Record: {link}.", "", "```sh", *_shell(command), "```", ""])


def _origin(path: Path) -> tuple[str, Environment, Sequence[str], str]:
    """When, where and by which command it was recorded, and what was moved."""
    try:
        run = read(path).run
    except ResultFileError:
        header, _ = arms.read(path)
        environment = from_plain(Environment, header["environment"])
        return header["started_at"], environment, _asked(header["command"], "--record"), ""
    size = f"{run.workload.name}, {format_size(run.workload.bytes)}; "
    return run.started_at, run.environment, _asked(run.command, "-o"), size


def _asked(command: Sequence[str], option: str) -> Sequence[str]:
    """The command without where its record went, with the present name of --no-fio."""
    command = ["--no-fio" if one == "--no-ceiling" else one for one in command]
    if option not in command:
        return command
    at = command.index(option)
    return [*command[:at], *command[at + 2 :]]


def _machine(environment: Environment) -> str:
    machine, storage = environment.machine, environment.storage
    memory = (machine.memory.total_bytes or 0) / GIB
    disk = (storage.device and storage.device.type) or "no disk of its own"
    return (
        f"{machine.cpu.model} with {machine.cpu.usable_cpus} cores, {memory:.0f} GiB, "
        f"Linux {machine.kernel_version}, {storage.fs_type} on {disk}"
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
    return "".join(arms.markdown(["part", "files", "lines"], [*rows[1:], rows[0]]))


def _output(lines: int, command: Sequence[str]) -> str:
    """The first `lines` lines that `iobench ...` prints on a terminal of 80 columns."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    plain = {"COLUMNS": "80", "LINES": "40", "TERM": "dumb", "NO_COLOR": "1"}
    with chdir(ROOT), mock.patch.dict(os.environ, plain), redirect_stdout(terminal):
        app_of()(list(command[1:]), standalone_mode=False)
    shown = terminal.getvalue().splitlines()[:lines]
    return "\n".join(["```text", f"$ {shlex.join(command)}", *shown, "```", ""])


def _picture(command: Sequence[str]) -> str:
    """The picture for each colour scheme, with the chart's text for those who cannot see it."""
    (record,) = [ROOT / one for one in command if one.endswith(".jsonl")]
    chart, *_ = document_of([record]).charts.values()
    name = command[-1]
    dark = name.replace(".svg", "-dark.svg")
    return (
        f'<picture>\n<source media="(prefers-color-scheme: dark)" srcset="{dark}">\n'
        f'<img alt="{html.escape(chart.alt)}" src="{name}">\n</picture>\n'
    )


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
                (directory / name.replace(".svg", "-dark.svg")).write_text(text, encoding="utf-8")
    return drawn


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        print(samples(path) + "\n" + _source(path.resolve(), str(path)))
    if len(sys.argv) == 1:
        draw(ROOT)
        for page in PAGES:
            if (text := rendered(page)) != page.read_text(encoding="utf-8"):
                page.write_text(text, encoding="utf-8")
                print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
