"""NVIDIA GPUs and the state of GPUDirect Storage, from the driver.

CUDA is not used: its initialisation costs seconds, and memory on every GPU.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from iobench.environment.facts import joined, size_of
from iobench.environment.kernelfs import read_text

_DRIVER, _NVIDIA_FS = Path("/proc/driver/nvidia"), Path("/proc/driver/nvidia-fs")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One NVIDIA GPU. `pci` is its address."""

    name: str = "unknown"
    memory_bytes: int | None = None
    """Of older records."""
    driver: str | None = None
    pci: str | None = None

    def __str__(self) -> str:
        memory = size_of(self.memory_bytes)
        return joined(self.name, memory, f"driver {self.driver or 'unknown'}")


@dataclass(frozen=True, kw_only=True)
class Gds:
    """GPUDirect Storage: driver, nvidia-fs module, cuFile library; `state` and `remedy` in words.

    `ready` means that all parts are present; no transfer was tried.
    """

    nvidia_driver: bool | None = None
    nvidia_fs: bool | None = None
    nvidia_fs_version: str | None = None
    cufile: str | None = None
    cuda_bindings: bool | None = None
    """Of older records."""
    ready: bool | None = None
    state: str = ""
    remedy: str = ""


def describe_gpus() -> tuple[Gpu, ...]:
    """Return name, driver and PCI address of every NVIDIA GPU from the driver's files.

    nvidia-smi is not started: all ranks of a node call this when they start, and it takes seconds
    then. Without these files (WSL) there are none.
    """
    text = read_text(_DRIVER / "version") or ""
    version = re.search(r"NVRM version:.*?\s(\d+(?:\.\d+)+)\s", text)
    gpus = []
    for path in sorted((_DRIVER / "gpus").glob("*/information")):
        lines = (line.partition(":") for line in (read_text(path) or "").splitlines())
        pairs = {name.strip(): value.strip() for name, _, value in lines}
        gpus.append(
            Gpu(
                name=pairs.get("Model", "unknown"),
                driver=version[1] if version else None,
                pci=pairs.get("Bus Location", "").lower() or None,
            )
        )
    return tuple(gpus)


def find_cufile() -> str | None:
    """Find libcufile in a CUDA wheel, in /usr/local/cuda*, or in the loader's cache."""
    wheels = [(entry or ".", "nvidia/*/lib/libcufile.so*") for entry in sys.path]
    for directory, pattern in [*wheels, ("/usr/local", "cuda*/lib64/libcufile.so*")]:
        try:
            found = sorted(Path(directory).glob(pattern))
        except OSError:  # an entry of sys.path that this user cannot list
            continue
        if found:
            return str(found[0])
    try:
        cache = Path("/etc/ld.so.cache").read_bytes()
    except OSError:
        return None
    known = re.search(rb"/[^\0]*/libcufile\.so[^\0]*", cache)
    return known[0].decode(errors="replace") if known else None


def has_driver() -> bool:
    return (_DRIVER / "version").exists()


def compatibility_mode() -> str:
    """Return why cuFile goes through host memory by its settings; empty if it does not.

    The settings are in cufile.json, and variables of the environment replace them. cuFile is not
    started. It also goes through host memory on file systems that it does not support.
    """
    path = os.environ.get("CUFILE_ENV_PATH_JSON") or "/etc/cufile.json"
    # cuFile accepts comments of C++ in its JSON.
    settings = re.sub(r"//[^\n]*", "", read_text(Path(path)) or "")
    if _is_set("CUFILE_FORCE_COMPAT_MODE", "force_compat_mode", settings):
        return "cuFile is configured for it (force_compat_mode)"
    if _NVIDIA_FS.exists() or _is_set("CUFILE_USE_PCIP2PDMA", "use_pci_p2pdma", settings):
        return ""
    return "nvidia-fs is not loaded and PCI P2PDMA is not configured"


def _is_set(variable: str, key: str, settings: str) -> bool:
    value = os.environ.get(variable)
    if value is not None:
        return value.lower() in ("1", "true")
    return re.search(rf'"{key}"\s*:\s*true\b', settings) is not None


def describe_gds(*, gpus: bool) -> Gds:
    """Describe GPUDirect Storage on a machine with or without `gpus`."""
    library = find_cufile()
    compatibility = compatibility_mode()
    state, remedy = gds_state(
        gpus=gpus, driver=has_driver(), library=library, compatibility=compatibility
    )
    return Gds(
        nvidia_driver=has_driver(),
        nvidia_fs=_NVIDIA_FS.exists(),
        nvidia_fs_version=read_text(_NVIDIA_FS / "version"),
        cufile=library,
        ready=gpus and library is not None and not compatibility,
        state=state,
        remedy=remedy,
    )


def gds_state(
    *, gpus: bool, driver: bool, library: str | None, compatibility: str
) -> tuple[str, str]:
    """Return what GPUDirect Storage lacks here, and the remedy."""
    if not gpus and not driver:
        return "no GPU", ""
    if not gpus:
        return (
            "an NVIDIA driver is loaded but reports no GPU",
            "Give this container or virtual machine a GPU (docker run --gpus all).",
        )
    if library is None:
        return (
            "libcufile was not found",
            "Install a CUDA build of torch, or NVIDIA's package gds-tools.",
        )
    if compatibility:
        return (
            f"cuFile goes through host memory (compatibility mode): {compatibility}",
            "Install NVIDIA's package nvidia-gds and run modprobe nvidia-fs; or set use_pci_p2pdma "
            "in cufile.json (local NVMe, open driver >= 565).",
        )
    return "all parts were found", ""
