"""Models: tensor templates (`families`), and architectures with their sources (`*.yaml`)."""

from __future__ import annotations

from iobench.workloads.models.families import FAMILIES
from iobench.workloads.models.model import Arch, Family, Model, Parameter

__all__ = ["FAMILIES", "Arch", "Family", "Model", "Parameter"]
