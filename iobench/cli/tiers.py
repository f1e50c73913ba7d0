"""`iobench tiers`: the tiers of a run, and a simulation of planned ones."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from iobench.cli.tiers_plan import plan
from iobench.cli.tiers_show import show

_DEFAULT = "show"


class _ShowByDefault(TyperGroup):
    """A group whose verb `show` may be left out: `iobench tiers runs/a`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._with_verb(ctx, args))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, self._with_verb(ctx, args))

    def _with_verb(self, ctx: Any, args: list[str]) -> list[str]:
        known = (*self.commands, *ctx.help_option_names)
        return args if not args or args[0] in known else [_DEFAULT, *args]


app = typer.Typer(
    cls=_ShowByDefault,
    no_args_is_help=True,
    help="Show where the checkpoints of a run are, or simulate tiers.",
)
app.command(_DEFAULT)(show)
app.command()(plan)
