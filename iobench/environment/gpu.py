"""NVIDIA GPUs and the state of GPUDirect Storage, from the driver.

CUDA is not used: its initialisation costs seconds, and memory on every GPU.
"""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from iobench.environment.kernelfs import read_text
from iobench.units import MIB

_DRIVER, _NVIDIA_FS = Path("/proc/driver/nvidia"), Path("/proc/driver/nvidia-fs")
_PCI = len("0000:17:00.0")
_QUERY = "name,memory.total,driver_version,pci.bus_id"


def parse_nvidia_smi(text: str) -> list[dict[str, Any]]:
    """Parse `nvidia-smi --query-gpu=name,memory.total,driver_version,pci.bus_id` as CSV."""
    gpus = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 4:
            continue
        name, memory_mib, driver, bus = fields
        gpus.append(
            {
                "name": name,
                "memory_bytes": int(memory_mib) * MIB if memory_mib.isdigit() else None,
                "driver": driver,
                "pci": bus.lower(),
            }
        )
    return gpus


def parse_gpu_information(text: str) -> dict[str, Any]:
    """Parse the text of /proc/driver/nvidia/gpus/BUS/information, which describes one GPU."""
    pairs = {k.strip(): v.strip() for k, _, v in (ln.partition(":") for ln in text.splitlines())}
    return {
        "name": pairs.get("Model", "unknown"),
        "memory_bytes": None,
        "driver": None,
        "pci": pairs.get("Bus Location", "").lower() or None,
    }


def parse_driver_version(text: str) -> str | None:
    """Return the driver's version from the text of /proc/driver/nvidia/version."""
    found = re.search(r"NVRM version:.*?\s(\d+(?:\.\d+)+)\s", text)
    return found[1] if found else None


def gpus_of_driver() -> list[dict[str, Any]]:
    """Return name, driver and PCI address of every NVIDIA GPU from the driver's files.

    It takes no time and starts no program. Without these files (WSL) it returns nothing.
    """
    driver = parse_driver_version(read_text(_DRIVER / "version") or "")
    return [
        parse_gpu_information(read_text(path) or "") | {"driver": driver}
        for path in sorted((_DRIVER / "gpus").glob("*/information"))
    ]


def describe_gpus() -> list[dict[str, Any]]:
    """Return name, memory in bytes, driver and PCI address of every NVIDIA GPU.

    Runs nvidia-smi; if that is missing or fails, reads the driver's files. Names are those of the
    driver's files in either case, like in `machine_fingerprint`. Never raises.
    """
    import shutil
    import subprocess

    known = gpus_of_driver()
    program = shutil.which("nvidia-smi")
    if program is None:
        return known
    command = [program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return known
    # nvidia-smi writes the PCI domain with 8 digits, the driver's files with 4.
    names = {(gpu["pci"] or "")[-_PCI:]: gpu["name"] for gpu in known}
    return [
        gpu | {"name": names.get(gpu["pci"][-_PCI:], gpu["name"])}
        for gpu in parse_nvidia_smi(answer.stdout)
    ]


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


def describe_gds(gpus: list[dict[str, Any]]) -> dict[str, Any]:
    """Describe driver, nvidia-fs module and cuFile library; `state` and `remedy` are sentences.

    `ready` means that all parts are present; no transfer was tried.
    """
    driver = read_text(_DRIVER / "version") is not None
    module = _NVIDIA_FS.exists()
    library = find_cufile()
    bindings = find_spec("cuda") is not None and find_spec("cuda.bindings") is not None
    state, remedy = gds_state(
        gpus=bool(gpus), driver=driver, module=module, library=library, bindings=bindings
    )
    return {
        "nvidia_driver": driver,
        "nvidia_fs": module,
        "nvidia_fs_version": read_text(_NVIDIA_FS / "version"),
        "cufile": library,
        "cuda_bindings": bindings,
        "ready": bool(gpus) and module and library is not None,
        "state": state,
        "remedy": remedy,
    }


def gds_state(
    *, gpus: bool, driver: bool, module: bool, library: str | None, bindings: bool = True
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
    if not bindings:
        return (
            "the package cuda-bindings is not installed",
            "pip install 'iobench[gds]', for --writer gds.",
        )
    if not module:
        return (
            "nvidia-fs is not loaded: cuFile goes through host memory (compatibility mode)",
            "Install NVIDIA's package nvidia-gds and run modprobe nvidia-fs; or configure cuFile "
            "for PCI P2PDMA (local NVMe, open driver >= 565).",
        )
    return "nvidia-fs is loaded and libcufile was found", ""
