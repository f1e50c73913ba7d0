"""Models: tensor templates per family (`*.py`) and architectures with their sources (`*.yaml`)."""

from __future__ import annotations

from pathlib import Path

from iobench.workloads.models.bloom import BLOOM
from iobench.workloads.models.dlio import DLIO_LLAMA
from iobench.workloads.models.gpt2 import GPT2
from iobench.workloads.models.llama import LLAMA
from iobench.workloads.models.megatron_gpt import MEGATRON_GPT
from iobench.workloads.models.megatron_moe import MEGATRON_MOE
from iobench.workloads.models.model import Arch, Family, Model, Parameter
from iobench.workloads.models.moe import DEEPSEEK_V3, MIXTRAL, QWEN3_MOE

__all__ = ["FAMILIES", "Arch", "Family", "Model", "Parameter", "model_names", "model_path"]

FAMILIES = {
    family.id: family
    for family in (
        *(LLAMA, GPT2, BLOOM, MEGATRON_GPT, DLIO_LLAMA),
        *(MIXTRAL, QWEN3_MOE, DEEPSEEK_V3, MEGATRON_MOE),
    )
}
"""Every family of tensor templates, by id."""

_DIRECTORY = Path(__file__).parent


def model_names() -> list[str]:
    """Return the names of the architectures that ship with iobench, sorted."""
    return sorted(path.stem for path in _DIRECTORY.glob("*.yaml"))


def model_path(name: str) -> Path:
    """Return the path of the YAML file of the architecture `name`."""
    return _DIRECTORY / f"{name}.yaml"
