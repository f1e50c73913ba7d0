"""Watch: runs an action on a module directly after its import."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

__all__ = ["Watch"]


class Watch:
    """Calls `actions[name](module)` after the module of that name was executed.

    It is a finder in sys.meta_path. It does not derive from MetaPathFinder, since importlib.abc is
    slow to import. The module keeps its own loader and spec. For modules that are already loaded
    the action runs at once.
    """

    def __init__(self, actions: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._actions = dict(actions)

    def begin(self) -> None:
        """Start watching."""
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
