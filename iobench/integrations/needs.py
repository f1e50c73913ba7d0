"""The error of an integration whose framework is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["needs"]


@contextmanager
def needs(package: str, requirement: str) -> Iterator[None]:
    """Wrap the imports of `package`: ImportError names what to install if it is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ImportError(
            f"this integration of iobench needs {package}: pip install '{requirement}'",
            name=error.name,
        ) from error
