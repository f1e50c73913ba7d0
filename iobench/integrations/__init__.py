"""Integrations: frameworks that save and restore through a writer of iobench.

Each module needs only its own framework. `torch_dropins` and `safetensors_dropins` have the
functions of `iobench.torch` and `iobench.safetensors`; `redirect` is `iobench exec`.
"""

from importlib import import_module
from types import ModuleType

__all__ = ["accelerate", "dcp", "deepspeed", "dlio", "lightning", "transformers"]


def __getattr__(name: str) -> ModuleType:
    """Import a module of `__all__` on first access, since it loads its framework."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return __all__
