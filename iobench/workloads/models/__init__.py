"""Models: tensor templates (`families`), and architectures with their sources (`*.yaml`)."""

from __future__ import annotations

from pathlib import Path

from iobench.workloads.models.families import FAMILIES
from iobench.workloads.models.model import Arch, Family, Model, Parameter

__all__ = ["FAMILIES", "Arch", "Family", "Model", "Parameter", "model_names", "model_path"]

_DIRECTORY = Path(__file__).parent


def model_names() -> list[str]:
    return sorted(path.stem for path in _DIRECTORY.glob("*.yaml"))


def model_path(name: str) -> Path:
    return _DIRECTORY / f"{name}.yaml"
