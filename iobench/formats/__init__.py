"""Conversion between state dicts and file images: safetensors, torch zip."""

from importlib import import_module
from types import ModuleType

__all__ = ["safetensors", "torch_file"]


def __getattr__(name: str) -> ModuleType:
    """Import a module of `__all__` at its first use, because it loads torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return __all__
