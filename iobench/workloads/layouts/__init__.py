"""Layouts: the ways in which frameworks split a model's state into files, registered by id."""

from __future__ import annotations

from iobench.workloads.layouts.deepspeed import DeepSpeedZero1, DeepSpeedZero2, DeepSpeedZero3
from iobench.workloads.layouts.fsdp_dcp import FsdpDcp
from iobench.workloads.layouts.huggingface import HfExport, HfTrainer
from iobench.workloads.layouts.layout import MAX_RANKS, Layout
from iobench.workloads.layouts.megatron import MegatronLegacy, MegatronTorchDist
from iobench.workloads.layouts.mlperf import MlPerf

__all__ = ["LAYOUTS", "MAX_RANKS", "Layout"]

LAYOUTS: dict[str, type[Layout]] = {
    layout.id: layout
    for layout in (
        HfTrainer,
        HfExport,
        DeepSpeedZero1,
        DeepSpeedZero2,
        DeepSpeedZero3,
        FsdpDcp,
        MegatronLegacy,
        MegatronTorchDist,
        MlPerf,
    )
}
"""Every layout, by id."""
