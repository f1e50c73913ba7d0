"""What `iobench exec` does in each Python process of the script, before its first line.

Nothing is loaded that a process without torch would pay for: what redirects and counts comes with
the first module that can save, and what saves with the first save.
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
    """Redirect in this process, counting in the directory `session`.

    `problem` notes for the summary what cannot be redirected; it is told at once too.
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
            except Exception as error:  # noqa: BLE001 -- the script goes on with stock functions
                reason = f"{type(error).__name__}: {error}"
                text = " ".join(f"{module.__name__} is not redirected: {reason}".split())
                sys.stderr.write(f"iobench exec: {text}\n")
                problem(text)

        return action

    actions = {
        "torch.serialization": "torch",
        "safetensors.torch": "safetensors",
        "torch.distributed.checkpoint.filesystem": "dcp",
    }
    Watch({module: redirecting(function) for module, function in actions.items()}).begin()
