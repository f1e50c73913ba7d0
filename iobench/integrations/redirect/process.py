"""What `iobench exec` does in each Python process of the script, before its first line."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from iobench.integrations.redirect.tally import Tally
from iobench.integrations.redirect.watch import Watch

__all__ = ["begin"]


def begin(session: str) -> None:
    """Redirect in this process, counting in the directory `session`. Loads nothing heavy yet."""
    tally = Tally(session)

    def redirecting(function: str) -> Callable[[ModuleType], None]:
        def action(module: ModuleType) -> None:
            try:
                from iobench.integrations.redirect import patches

                getattr(patches, function)(module, tally)
                tally.seen()
            except Exception as error:  # noqa: BLE001 -- the script goes on with stock functions
                reason = f"{type(error).__name__}: {error}"
                tally.problem(f"{module.__name__} is not redirected: {reason}")

        return action

    actions = {
        "torch.serialization": "torch",
        "safetensors.torch": "safetensors",
        "torch.distributed.checkpoint.filesystem": "dcp",
    }
    Watch({module: redirecting(function) for module, function in actions.items()}).begin()
