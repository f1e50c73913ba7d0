"""Watch: does something to modules as soon as they have been imported, whoever imports them."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

__all__ = ["Watch"]


class Watch:
    """Calls `actions[name](module)` once the module of that name has been executed.

    A finder of sys.meta_path, not derived from MetaPathFinder, whose module is slow to load. The
    module keeps the loader and the spec that it would have had. Modules that are there already are
    treated at once.
    """

    def __init__(self, actions: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._actions = dict(actions)

    def begin(self) -> None:
        """Watch from now on."""
        for name in [name for name in self._actions if name in sys.modules]:
            self._actions.pop(name)(sys.modules[name])
        sys.meta_path.insert(0, self)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """What the finders after this one say, with the loader's last step extended."""
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
