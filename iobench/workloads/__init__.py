"""Workloads: every file of every rank of a model's checkpoint, computed from a few lines of YAML.

    workload = iobench.workloads.load("llama7b")
    for file in workload.files(rank=0):
        print(file.path, file.size_bytes, len(file.tensors))

`models` has architectures and tensor names. `layouts` has the ways in which frameworks split them
into files. Nothing here needs torch. Loading the first workload imports yaml.
"""

from __future__ import annotations

from iobench.workloads.catalogue import load, load_model, names
from iobench.workloads.specs import SAFETENSORS_METADATA, FileSpec, TensorSpec
from iobench.workloads.workload import Scale, StepTime, Workload

__all__ = [
    "SAFETENSORS_METADATA",
    "FileSpec",
    "Scale",
    "StepTime",
    "TensorSpec",
    "Workload",
    "load",
    "load_model",
    "names",
]
