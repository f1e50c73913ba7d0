"""The verbs of `iobench`: `app_of` loads the module of one verb, or all of them (0.07 s)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from iobench._version import __version__
from iobench.cli.given import Verb, declare
from iobench.cli.launched import one_process

_ONE_PROCESS = ("autotune", "plan", "reproduce", "train")
"""Verbs that measure, or think, in one process: several ranks would do the same work at once."""

_GROUPS = {
    "Measure": ("run", "autotune", "train", "doctor"),
    "Read": ("show", "report", "compare", "plan", "reproduce"),
    "Use": ("exec", "verify", "export", "offload", "tiers", "replicas"),
    "Manage": ("workloads", "writers", "results", "s3"),
}
"""The sections of `iobench --help`."""
VERBS = tuple(name for names in _GROUPS.values() for name in names)
"""Each is a module of `iobench.cli` (report is in that of show) with the typer app `app` of several
commands, or else a function of that name. The module may have SETTINGS of the command."""

_EXAMPLES = """
iobench run --workload llama7b --writer odirect
iobench run --target /mnt/nvme,/mnt/lustre --writer odirect,peer:torch-save
iobench run --size 4GiB --numjobs 1,2,4 -o results/mine.jsonl
iobench autotune --workload llama7b -o writer.toml
iobench autotune --target s3://bucket/prefix --objective restore
iobench autotune --max-time 10min --max-bytes 200GiB --journal tune.jsonl
iobench train --workload llama7b --size 4GiB
iobench train --workload gpt5b-nemo --simulate-step --every 10
iobench train --writer hybrid --mode sync,async -o train.jsonl
iobench doctor
iobench doctor --target /mnt/lustre
iobench doctor --format json
iobench show results/run.jsonl -v
iobench show before.jsonl after.jsonl -o both.html
iobench show tune.jsonl -o tune.html
iobench report results/run.jsonl -o run.html
iobench report before.jsonl after.jsonl -o both.html
iobench report tune.jsonl -o tune.html
iobench compare before/ after/
iobench compare old1.jsonl old2.jsonl -- new1.jsonl new2.jsonl
iobench compare old.jsonl new.jsonl --strict --format md
iobench plan --results results/run.jsonl --nodes 64
iobench plan --results results/run.jsonl --nodes 1024-131072 --blocking 2s
iobench plan --save 30s --restore 60s --nodes 64 --interval 30min
iobench reproduce hybrid-io --target /mnt/nvme
iobench reproduce pccheck --format json
iobench reproduce hybrid-io --results results/run.jsonl
iobench exec --config writer.toml -- python train.py --steps 100
iobench exec --config odirect,block_size=8MiB -- python train.py
iobench exec --config hybrid --report saved.json -- python train.py
iobench verify runs/a
iobench verify ./Llama-3.1-8B --record
iobench verify model.pt --against model.safetensors
iobench export runs/a -o exported --key model --dtype bf16
iobench export runs/a/step-500 -o model.pt --format torch
torchrun --nproc-per-node 8 -m iobench export checkpoints/dcp -o exported
iobench offload show /mnt/nvme/adam
iobench offload export /mnt/nvme/adam -o adam.pt
iobench offload export /mnt/nvme/adam -o weights.safetensors --step 500
iobench tiers checkpoints/
iobench tiers checkpoints/ --format json
watch iobench tiers checkpoints/
iobench replicas status
iobench replicas status --format json
iobench replicas clean
iobench workloads list
iobench workloads show llama7b --files
iobench workloads import ./checkpoint-1000 --anonymous -o mine.yaml
iobench writers
iobench writers --target /mnt/nvme
iobench writers --target s3://bucket/prefix --format json
iobench results scrub results/mine.jsonl -o results/reference-mine.jsonl
iobench results scrub tune.jsonl -o reference-tune.jsonl
iobench results scrub --help
iobench s3 list-uploads s3://bucket/prefix --older-than 1d
iobench s3 abort-uploads s3://bucket/prefix --older-than 1d
iobench s3 abort-uploads s3://bucket
"""
EXAMPLES = {
    verb: [line for line in _EXAMPLES.splitlines() if f"iobench {verb}" in line] for verb in VERBS
}
"""Three examples for the help of each verb."""


class VerbGroup(TyperGroup):
    """The verbs of iobench, listed in sections."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 -- click passes it
        for title, names in _GROUPS.items():
            rows = [
                (name, self.commands[name].get_short_help_str(66))
                for name in names
                if name in self.commands
            ]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def app_of(verb: str | None = None) -> typer.Typer:
    """Return the command line with `verb` alone; with all verbs if there is no such verb."""
    app = typer.Typer(
        name="iobench",
        cls=VerbGroup,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog="Start with: iobench doctor, then iobench run. Exit codes: 0 done, "
        "1 failed, 2 usage, 3 writer unavailable here, 4 data differ, 5 slower than before, "
        "130 interrupted.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_main)
    for name in VERBS if verb not in VERBS else (verb,):
        module = import_module(f"iobench.cli.{'show' if name == 'report' else name}")
        if group := getattr(module, "app", None):
            for command in group.registered_commands:
                command.cls, command.help = Verb, declare(command.callback)
            app.add_typer(group, name=name, epilog=_epilog(name))
        else:
            function = getattr(module, name, None) or getattr(module, f"{name}_")
            settings = {"cls": Verb, "epilog": _epilog(name), **getattr(module, "SETTINGS", {})}
            app.command(name, help=declare(function), **settings)(function)
    return app


def _epilog(verb: str) -> str:
    return "\n".join(("\b", "Examples:", *(f"  {one}" for one in EXAMPLES[verb])))


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
