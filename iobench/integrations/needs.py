"""The error of an integration whose framework is missing or too old."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(package: str, requirement: str) -> Iterator[None]:
    """Wrap the imports of `package`.

    `requirement` is what pip installs: `package>=1.2`, or a text without a version. Raises
    ImportError that names it if the package is missing or older.
    """
    least = requirement.partition(">=")[2]
    if least and (found := _older(package, least)):
        raise ImportError(
            f"this integration of iobench needs {requirement}, and {package} {found} is installed: "
            f"pip install '{requirement}'",
            name=package,
        )
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ImportError(
            f"this integration of iobench needs {package}: pip install '{requirement}'",
            name=error.name,
        ) from error


def _older(package: str, least: str) -> str:
    """Return the installed version if it is older than `least`, else an empty string.

    A package without metadata, such as a source tree on the path, is taken as it is.
    """
    from packaging.version import Version  # every framework needs it, too

    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
    return found if Version(Version(found).base_version) < Version(least) else ""
