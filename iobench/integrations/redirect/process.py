"""Set-up of `iobench exec` in each Python process of the script, before its first line runs.

Processes without torch stay fast: the code that redirects and counts is imported with the first
module that can save, and the code that saves in a thread once torch is imported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

from iobench.integrations.redirect.watch import Watch

if TYPE_CHECKING:
    from iobench.integrations.redirect.call_counts import CallCounts

__all__ = ["begin"]


def begin(session: str, problem: Callable[[str], None]) -> None:
    """Redirect the calls of this process, and write counts to the directory `session`.

    `problem` records for the summary what cannot be redirected; stderr gets the same line at once.
    """

    @functools.cache
    def counts() -> CallCounts:
        from iobench.integrations.redirect.call_counts import CallCounts

        return CallCounts(session)

    def redirecting(function: str) -> Callable[[ModuleType], None]:
        def action(module: ModuleType) -> None:
            try:
                from iobench.integrations.redirect import patches

                counts().seen()
                getattr(patches, function)(module, counts())
            except Exception as error:  # noqa: BLE001 -- the script continues with stock functions
                reason = f"{type(error).__name__}: {error}"
                text = " ".join(f"{module.__name__} is not redirected: {reason}".split())
                sys.stderr.write(f"iobench exec: {text}\n")
                problem(text)

        return action

    functions = {
        "torch.serialization": "torch",
        "safetensors.torch": "safetensors",
        "torch.distributed.checkpoint.filesystem": "dcp",
    }
    actions = {module: redirecting(function) for module, function in functions.items()}
    Watch({**actions, "torch": _import_ahead}).begin()


def _import_ahead(_: ModuleType) -> None:
    from iobench.integrations.redirect import ahead

    ahead.begin()
