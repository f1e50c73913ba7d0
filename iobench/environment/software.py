"""Versions of all software that a figure can depend on, read without importing it.

Some imports are inside functions: writers import this package, and `iobench --help` must be fast.
"""

from __future__ import annotations

import functools
import platform
import re
from pathlib import Path

import iobench
from iobench.environment.kernelfs import read_text

PACKAGES = (
    *("torch", "numpy", "safetensors", "pandas", "pydantic", "xxhash", "pyuring", "boto3"),
    *("awscrt", "lightning", "transformers", "accelerate", "deepspeed", "runai-model-streamer"),
    "torch-checkpointing",
)


@functools.cache
def package_version(name: str) -> str | None:
    """Return the installed version of a Python package; None if it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def fio_version() -> str | None:
    """Return the version of fio on PATH, such as `3.33`; None if it is missing or fails."""
    import shutil
    import subprocess

    program = shutil.which("fio")
    if program is None:
        return None
    try:
        answer = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip().removeprefix("fio-") or None


def torch_cuda_version() -> str | None:
    """Return the CUDA version that the installed torch was built with, from its version file."""
    from importlib.util import find_spec

    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = read_text(Path(spec.origin).with_name("version.py")) or ""
    found = re.search(r"^cuda[^=\n]*=\s*'([^']+)'", text, re.MULTILINE)
    return found[1] if found else None


def distribution() -> str | None:
    """Return `Debian GNU/Linux 12 (bookworm)` or the like; None if unknown."""
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        return None


def describe_software() -> dict[str, str | None]:
    """Return the versions of Python, iobench, fio and the packages a result can depend on."""
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "iobench": iobench.__version__,
        "fio": fio_version(),
        "torch_cuda": torch_cuda_version(),
        "libc": " ".join(platform.libc_ver()).strip() or None,
    }
    return versions | {name: package_version(name) for name in PACKAGES}
