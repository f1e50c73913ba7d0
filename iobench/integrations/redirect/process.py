"""Set-up of `iobench exec` in each Python process of the script, before its first line runs.

Processes without torch stay fast: the code that redirects and counts is imported with the first
module that can save, and the code that saves by the first save.
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from iobench.integrations.redirect.call_counts import CallCounts


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
        "safetensors": "safetensors_open",
        "safetensors.torch": "safetensors",
        "torch.distributed.checkpoint.filesystem": "dcp",
    }
    actions = {module: redirecting(function) for module, function in functions.items()}
    Watch(actions).begin()


class Watch:
    """Calls `actions[name](module)` after the module of that name was executed.

    It is a finder in sys.meta_path. It does not derive from MetaPathFinder, since importlib.abc is
    slow to import. The module keeps its own loader and spec. For modules that are already loaded
    the action runs at once.
    """

    def __init__(self, actions: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._actions = dict(actions)

    def begin(self) -> None:
        for name in [name for name in self._actions if name in sys.modules]:
            self._actions.pop(name)(sys.modules[name])
        sys.meta_path.insert(0, self)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of the other finders, with the loader's `exec_module` extended."""
        action = self._actions.get(fullname)
        if action is None:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                self._extend(spec, fullname, action)
                return spec
        return None

    def _extend(
        self, spec: importlib.machinery.ModuleSpec, name: str, action: Callable[[ModuleType], None]
    ) -> None:
        loader = spec.loader
        if loader is None or not hasattr(loader, "exec_module"):
            return
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            execute(module)
            self._actions.pop(name, None)
            action(module)

        vars(loader)["exec_module"] = exec_module
