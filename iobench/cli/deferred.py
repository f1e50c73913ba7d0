"""load_when_used: defers the import of a package to its first use in this process."""

from __future__ import annotations

import sys
import threading
from importlib import import_module
from types import ModuleType
from typing import Any

__all__ = ["load_when_used"]

_lock = threading.RLock()


def load_when_used(package: str) -> None:
    """Let `import package` return a module that loads the package when it is first used.

    Does nothing if the package is loaded already.
    """
    sys.modules.setdefault(package, _Deferred(package))


class _Deferred(ModuleType):
    """Replaces a package in sys.modules; the first missing attribute loads all of them.

    importlib.util.LazyLoader loads at the second `import` statement already, because that looks at
    `__spec__` (CPython 3.11).
    """

    def __getattr__(self, name: str) -> Any:
        with _lock:
            if sys.modules.get(self.__name__) is self:
                del sys.modules[self.__name__]
            found = import_module(self.__name__)
            vars(self).update(vars(found))
        return getattr(found, name)
