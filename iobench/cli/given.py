"""Options that several verbs share, and checks of the given ones."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from iobench.errors import ResultFileError, UsageError
from iobench.report.render import ReportFormat
from iobench.writers.s3_store.target import S3Target, is_s3

if TYPE_CHECKING:
    from iobench.results import ResultFile

DEFAULT_WORKLOAD = "llama7b"
LARGEST_SEED = 2**32 - 1
"""Largest seed that every generator and every reader of records accepts."""
_TABLES = re.compile(r"\n\n(?=(?:Arguments|Options):\n)")
_CONTINUED = re.compile(r"\n {8}")
_ENTRY = re.compile(r"    (.+?): (.*?)(?: \[(.*)\])?")
_LIMITS: dict[str, dict[str, Any]] = {
    **{name: {"min": 1} for name in ("steps", "repeat", "gpus_per_node")},
    "rank": {"min": 0},
    "seed": {"min": 0, "max": LARGEST_SEED},
}
"""What the values of options are bounded by, where they are whole numbers."""
_LISTS = ("LIST", "N,...", "WRITERS")


FormatOption = Annotated[
    Literal["table", "json"], typer.Option("--format", help="How to print it.")
]
ReportFormatOption = Annotated[
    ReportFormat, typer.Option("--format", help="How to print it; html is a page with charts.")
]
WorkloadArgument = Annotated[
    str | None, typer.Argument(metavar="WORKLOAD", hidden=True, show_default=False)
]
WorkloadOption = Annotated[
    str | None,
    typer.Option(
        "--workload",
        "-w",
        metavar="WORKLOAD",
        help="Name (iobench workloads list), YAML file, or checkpoint.",
        show_default=DEFAULT_WORKLOAD,
    ),
]
QuietOption = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Print no plan and no progress; errors and warnings stay."),
]


@cache
def declare(verb: Callable[..., Any]) -> str:
    """Make options and arguments of `verb` by the tables in its docstring; return what is above.

    An entry is `-o, --output FILE: its help [its default in words]`, with longer lines indented.
    The heading above it is its section in the help. An argument has no name but that in the help:
    the first parameters are arguments. A parameter with an `Annotated` type is not in a table.
    """
    text, *tables = _TABLES.split(inspect.getdoc(verb) or "", maxsplit=1)
    hints = get_type_hints(verb, include_extras=True)
    own = [name for name, hint in hints.items() if get_origin(hint) is not Annotated]
    arguments = (name for name in own if hints[name] is not typer.Context)
    section = ""
    for line in _CONTINUED.sub(" ", "\n".join(tables)).splitlines():
        found = _ENTRY.fullmatch(line)
        if found is None:
            section = line.removesuffix(":")
            continue
        head, about, shown = found.groups()
        if section == "Arguments":
            name = next(arguments)
            made = typer.Argument(metavar=head, help=about, show_default=shown or True)
        else:
            names = [word.rstrip(",") for word in head.split() if word.startswith("-")]
            name = _parameter(max(names, key=len), own)
            made = typer.Option(
                *names,
                metavar=None if head.endswith(names[-1]) else head.split()[-1],
                help=about,
                show_default=shown or True,
                rich_help_panel=None if section == "Options" else section,
                **({} if hints[name] is str else _LIMITS.get(name, {})),
            )
        verb.__annotations__[name] = Annotated[hints[name], made]
    return text


def _parameter(option: str, names: Collection[str]) -> str:
    """Return which of the parameters `names` is that of `option`; `_` follows a name of Python."""
    name = option.lstrip("-").partition("/")[0].replace("-", "_")
    return name if name in names else f"{name}_"


class Verb(TyperCommand):
    """Command of a verb: help in sections, and each list in one option.

    The sections are those of `rich_help_panel`, as text: typer itself groups options only in boxes
    that it draws with rich, which takes longer to load than everything else that `--help` needs.
    """

    def make_parser(self, ctx: Any) -> Any:
        """Return the parser, which refuses a list that is given in two options.

        The last one would count, and the others would have no effect without a word.
        """
        parser = super().make_parser(ctx)
        parse = parser.parse_args

        def once(args: list[str]) -> Any:
            found = parse(args)
            for parameter, times in Counter(found[2]).items():
                if times > 1 and parameter.metavar in _LISTS and not parameter.multiple:
                    raise typer.BadParameter(
                        f"is given {times} times; give one, with commas between the values",
                        ctx=ctx,
                        param_hint=parameter.opts[0],
                    )
            return found

        setattr(parser, "parse_args", once)  # noqa: B010 -- a method, which mypy lets nobody assign
        return parser

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                is_argument = parameter.param_type_name == "argument"
                panel = getattr(parameter, "rich_help_panel", None)
                title = "Arguments" if is_argument else panel or "Options"
                word = record[0].partition(" <")[0] if is_argument else record[0]
                sections.setdefault(title, []).append((word, record[1]))
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def given(ctx: typer.Context) -> Iterator[tuple[str, str]]:
    """Yield (parameter, option) for each option on the command line, without defaults."""
    for option in ctx.command.params:
        name = option.name or ""
        if getattr(ctx.get_parameter_source(name), "name", None) == "COMMANDLINE":
            yield name, option.opts[0]


def check_effect(ctx: typer.Context, names: tuple[str, ...], why: str) -> None:
    """Raise UsageError if any of `names` is given; `why` is the reason that it has no effect."""
    found = [option for name, option in given(ctx) if name in names]
    if found:
        raise UsageError(f"{', '.join(found)}: {why}; leave out {', '.join(found)}")


def the_workload(argument: str | None, option: str | None, default: str = DEFAULT_WORKLOAD) -> str:
    """Return the workload given by position or by option. Raises UsageError for two names."""
    if argument is not None and option is not None and argument != option:
        raise UsageError(f"two workloads are given, {argument} and --workload {option}; give one")
    if argument is not None:
        return argument
    return default if option is None else option


def check_target(target: str) -> None:
    """Raise UsageError for an unknown scheme, and for an empty text: most likely unset."""
    if not target:
        raise UsageError("--target '': names nothing; leave it out for the current directory")
    scheme, separator, _ = target.partition("://")
    if separator and scheme.isalnum() and scheme != "s3":
        raise UsageError(
            f"--target {target}: {scheme}:// is not known; give a directory, or s3://bucket/prefix"
        )
    if is_s3(target):
        S3Target.parse(target)


def the_directory(target: str) -> Path:
    """Return the directory of --target. Raises UsageError for an empty text, and for a bucket."""
    check_target(target)
    if target.startswith("s3://"):
        raise UsageError(f"--target {target}: is a bucket; this command needs a directory")
    return Path(target)


def check_place(path: Path, option: str = "-o") -> None:
    """Raise UsageError for a directory, and for a file in one that is missing or not writable."""
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no directory {path.parent}; make it first")
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a directory; name a file")
    if not os.access(path.parent, os.W_OK | os.X_OK, effective_ids=True):
        where = path.parent.absolute()
        raise UsageError(
            f"{option} {path}: {where} is not writable; give {option} FILE in another directory"
        )


def check_output(output: Path | None, option: str = "-o", *, remedy: str = "") -> None:
    """Raise ResultFileError if the result file cannot be created.

    The directory of a file given with `option` must exist: a typo must not create directories.
    `remedy` is what to do where results/ cannot be created.
    """
    from iobench.results import check_new, default_path

    if output is None:
        path = default_path("run")
        try:
            check_new(path)
        except ResultFileError as error:
            raise ResultFileError(f"{error}; {remedy or f'give {option} FILE'}") from None
        return
    check_new(output)
    check_place(output, option)


def read_record(path: Path) -> ResultFile:
    """Return the records of a result file, with a warning if it is incomplete."""
    from iobench.results import read

    result = read(path)
    if result.incomplete:
        print_warning(result.incomplete)
    return result


HERE = "."
"""The default of --target."""
_PLAN_INDENT = " " * 10  # width of the names of a plan's lines


@contextmanager
def quiet_stdout() -> Iterator[None]:
    """Redirect output of libraries from stdout to stderr: stdout has only the report."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def print_plan(lines: Iterable[str], *, indent: str = _PLAN_INDENT) -> None:
    """Print lines to stderr, wrapped between words if it is a terminal."""
    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else 0
    for line in lines:
        if 0 < width < len(line):
            from iobench.report.grid import wrapped  # it loads rich, so only for a long line

            line = wrapped(line, width, indent)
        print(line, file=sys.stderr)


def print_warning(text: str) -> None:
    """Print a warning to stderr, wrapped like a plan."""
    print_plan([f"warning: {text}"], indent=" " * len("warning: "))


@contextmanager
def preparing(what: str, *, quiet: bool = False) -> Iterator[None]:
    """Show `what` on a terminal during the block, before there is other progress.

    Plans load many modules and probe the writers, which takes seconds without other output.
    """
    if quiet or not sys.stderr.isatty():
        yield
        return
    print(f"{what} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)  # back to the start, and clear
