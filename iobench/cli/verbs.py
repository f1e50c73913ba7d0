"""The verbs of `iobench`: `app_of` loads the module of one verb, or all of them (0.07 s)."""

from __future__ import annotations

from importlib import import_module

import typer

from iobench._version import __version__
from iobench.cli.launched import one_process

__all__ = ["app_of"]

_ONE_PROCESS = ("autotune", "plan", "reproduce", "train")
"""Verbs that measure, or think, in one process: several ranks would do the same work at once."""

_VERBS = {
    "run": "run",
    "autotune": "autotune",
    "workloads": "app",
    "writers": "writers",
    "doctor": "doctor",
    "show": "show",
    "report": "report",
    "train": "train",
    "plan": "plan",
    "reproduce": "reproduce",
    "compare": "compare",
    "exec": "exec_",
    "results": "app",
    "s3": "app",
    "agent": "app",
    "offload": "app",
    "tiers": "tiers",
}
"""The name of its function or app, in the module of `iobench.cli` that has the verb's name. That
module may have SETTINGS of the command."""


def app_of(verb: str | None = None) -> typer.Typer:
    """Return the command line with `verb` alone; with all verbs if there is no such verb."""
    app = typer.Typer(
        name="iobench",
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog="Start with: iobench doctor, then iobench run. Exit codes: 0 done, "
        "1 failed, 2 usage, 3 writer unavailable here, 4 data differ, 5 slower than before, "
        "130 interrupted.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_main)
    for name in _VERBS if verb not in _VERBS else (verb,):
        module = import_module(f"iobench.cli.{name}")
        found = getattr(module, _VERBS[name])
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name)
        else:
            app.command(name, **getattr(module, "SETTINGS", {}))(found)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"iobench {__version__}")
        raise typer.Exit


def _main(
    ctx: typer.Context,
    _shown: bool = typer.Option(
        False, "--version", help="Print the version.", callback=_version, is_eager=True
    ),
) -> None:
    """Measure how fast checkpoints are saved and restored here, and by which I/O path."""
    if ctx.invoked_subcommand in _ONE_PROCESS:
        one_process(ctx.invoked_subcommand)
