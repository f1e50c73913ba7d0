"""Generations as files of stock formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from iobench.errors import UsageError
from iobench.formats import safetensors, torch_file
from iobench.formats.tensors import torch_dtype
from iobench.offload.reading import read_parameters
from iobench.offload.record import GenerationRecord
from iobench.offload.restore import Wanted, candidates, fill_parameters
from iobench.offload.stock import stock_state
from iobench.offload.store import GenerationStore
from iobench.writers.buffered import BufferedWriter

__all__ = ["export"]

_SPEED = {"iodepth": 8, "block_size": 4 << 20}
_SUFFIXES = (".safetensors", ".pt", ".pth")


def export(directory: Path, wanted: Wanted, output: Path) -> int:
    """Write one generation to `output` and return its updates; durable and verified.

    `*.safetensors` gets the parameters in their own dtypes, `*.pt` the state_dict of the stock
    optimizer. Needs the lock: no trainer may be at work. Takes memory for the whole file.
    Raises UsageError for another suffix or an unknown step, TargetError, DataMismatchError and
    TransferError.
    """
    if output.suffix not in _SUFFIXES:
        raise UsageError(f"{output}: its name must end with {' or '.join(_SUFFIXES)}")
    store = GenerationStore.open(directory)
    try:
        found = next(iter(candidates(store, wanted)), None)
        if found is None:
            raise UsageError(f"{directory}: has no generation")
        record = found.record
        store.check_headers(record)
        writer, parent = BufferedWriter(), output.parent
        if output.suffix == ".safetensors":
            safetensors.save(_parameters(store, record), output.name, parent, writer)
        else:
            torch_file.save(_state_dict(store, record), output.name, parent, writer)
        return record.updates
    finally:
        store.close()


def _parameters(store: GenerationStore, record: GenerationRecord) -> dict[str, torch.Tensor]:
    specs = store.layout.parameters
    made = [torch.empty(one.shape, dtype=torch_dtype(one.dtype)) for one in specs]

    def deliver(chunk: int, data: Any) -> None:
        fill_parameters(store.layout, chunk, data, made)

    read_parameters(store, record, deliver, **_SPEED)
    return {spec.name: tensor for spec, tensor in zip(specs, made, strict=True)}


def _state_dict(store: GenerationStore, record: GenerationRecord) -> dict[str, Any]:
    specs = store.layout.parameters
    groups = []
    for number, values in enumerate(record.groups):
        own = [index for index, spec in enumerate(specs) if spec.group == number]
        names = [specs[index].name for index in own]
        betas = {"betas": tuple(values["betas"])} if "betas" in values else {}
        groups.append({**values, **betas, "params": own, "param_names": names})
    return {"state": stock_state(store, record, **_SPEED), "param_groups": groups}
