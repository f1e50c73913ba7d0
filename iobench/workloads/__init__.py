"""What a model's checkpoint looks like: every file of every rank, from a few lines of YAML.

    workload = iobench.workloads.load("llama7b")
    for file in workload.files(rank=0):
        print(file.path, file.size_bytes, len(file.tensors))

`models` holds architectures and tensor names, `layouts` the ways frameworks cut them into files.
Nothing here needs torch; pydantic and yaml are imported when the first workload is loaded.
"""

from __future__ import annotations

from iobench.workloads.catalogue import catalogue, load, load_model, names
from iobench.workloads.scaling import Scale
from iobench.workloads.specs import SAFETENSORS_METADATA, FileSpec, TensorSpec
from iobench.workloads.workload import StepTime, Workload

__all__ = [
    "SAFETENSORS_METADATA",
    "FileSpec",
    "Scale",
    "StepTime",
    "TensorSpec",
    "Workload",
    "catalogue",
    "load",
    "load_model",
    "names",
]
