"""The state as torch.optim.AdamW has it: read from a generation, also into a file, or put into the
next one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from iobench.checkpoint.ranked.structure import is_sharded, sharded_like
from iobench.errors import StateError, UsageError
from iobench.formats import safetensors, torch_file
from iobench.formats.tensors import torch_dtype
from iobench.offload.chunks import ChunkBuffer, read_chunks
from iobench.offload.groups import check_values, kept_values, put_values
from iobench.offload.layout import ADAM, StateLayout
from iobench.offload.record import GenerationRecord
from iobench.offload.restore import Wanted, candidates, fill_parameters
from iobench.offload.shards import local_part, local_shard
from iobench.offload.state import OptimizerState
from iobench.offload.store import GenerationStore
from iobench.offload.update import flat_view, place, step_counter
from iobench.writers.buffered import BufferedWriter

if TYPE_CHECKING:
    import numpy.typing as npt

_SUFFIXES = (".safetensors", ".pt", ".pth")


def stock_state(
    store: GenerationStore,
    record: GenerationRecord,
    *,
    whole: bool = False,
) -> dict[int, dict[str, torch.Tensor]]:
    """Return the `state` of torch's optimizer by the index of each parameter; verified.

    Each has `step`, `exp_avg` and `exp_avg_sq`; a 16-bit parameter also has `master`: its fp32
    weights. Parameters that were never updated have none, as in torch. With `whole` each has all
    of them. Takes as much memory. Raises DataMismatchError, TransferError.
    """
    layout = store.layout
    state: dict[int, dict[str, torch.Tensor]] = {}
    for index, spec in enumerate(layout.parameters):
        if whole or record.counts[index]:
            masters = whole or spec.dtype != "float32"
            names = (*ADAM[1:], ADAM[0]) if masters else ADAM[1:]
            made = {
                name: torch.empty(spec.shape, dtype=torch.float32, device="cpu") for name in names
            }
            state[index] = {"step": step_counter(int(record.counts[index])), **made}

    def deliver(buffer: ChunkBuffer) -> None:
        for piece in layout.pieces(buffer.chunk):
            made = state.get(piece.parameter, {})
            for name, part in zip(ADAM, buffer.tensors(), strict=True):
                if name in made:
                    flat_view(made[name])[piece.begin : piece.end].copy_(place(piece, part))

    read_chunks(store, record, "state", deliver)
    return state


def state_dict_of(here: OptimizerState, *, whole: bool = False) -> dict[str, Any]:
    """Return the state_dict of torch's optimizer, read from storage into memory; see `stock_state`.

    The state of a DTensor is DTensors with its sharding; on a GPU mesh they are moved to the GPU,
    where torch has them too. Waits until all steps are durable.
    """
    engine = here.settled(forget=True)
    engine.wait()
    record, parameters = engine.store.base, here.parameters()
    state: dict[int, dict[str, torch.Tensor]] = {}
    if record is not None:
        state = stock_state(engine.store, record, whole=whole)
    for index, values in state.items():
        if is_sharded(parameters[index]):
            for name in values.keys() & {*ADAM}:
                values[name] = sharded_like(parameters[index], values[name])
    groups, start = [], 0
    for group in here.groups:
        indices = list(range(start, start + len(group["params"])))
        groups.append({**group, "params": indices})
        start += len(indices)
    return {"state": state, "param_groups": groups}


class StockSource:
    """The `state` of a state_dict. A StateSource.

    Parameters without a state begin anew. Master weights are those of the state where it has them,
    and otherwise the values of the model.
    """

    def __init__(
        self,
        layout: StateLayout,
        parameters: Sequence[torch.Tensor],
        state: Mapping[int, Mapping[str, torch.Tensor]],
    ) -> None:
        """Raises StateError when `state` does not fit the parameters."""
        unknown = [index for index in state if index not in range(len(parameters))]
        if unknown:
            raise StateError(f"the state has parameters {unknown}; there are {len(parameters)}")
        self._parameters = parameters
        self._state = {
            index: {kind: local_part(value, parameters[index]) for kind, value in values.items()}
            for index, values in state.items()
        }
        for index, values in self._state.items():
            parameter = local_shard(parameters[index])
            name = layout.parameters[index].name
            for kind in ADAM:
                if values.get(kind) is not None and values[kind].shape != parameter.shape:
                    raise StateError(
                        f"{kind} of parameter {name} has the shape {list(values[kind].shape)}; "
                        f"the parameter has {list(parameter.shape)}"
                    )
            if "max_exp_avg_sq" in values:
                raise StateError(f"parameter {name} has max_exp_avg_sq: amsgrad is not supported")
            if len({kind in values for kind in ("step", *ADAM[1:])}) > 1:
                raise StateError(f"parameter {name} lacks step, exp_avg or exp_avg_sq")

    @property
    def counts(self) -> npt.NDArray[np.uint64]:
        """See StateSource."""
        states = [self._state.get(index, {}) for index in range(len(self._parameters))]
        return np.array([int(one.get("step", 0)) for one in states], dtype=np.uint64)

    def read(self, parameter: int, begin: int, into: Sequence[torch.Tensor]) -> None:
        """See StateSource."""
        values = self._state.get(parameter, {})
        end = begin + len(into[0])
        for kind, own in zip(ADAM, into, strict=True):
            if values.get(kind) is not None:
                own.copy_(values[kind].detach().reshape(-1)[begin:end])
            elif kind == ADAM[0]:
                own.copy_(flat_view(self._parameters[parameter])[begin:end])
            else:
                own.zero_()


def load_state(here: OptimizerState, state_dict: Mapping[str, Any], updates: int) -> None:
    """Make the state and the groups of a state_dict the next generation, after `updates` steps.

    It is durable on return, in all ranks. Raises UsageError or StateError when it does not fit.
    """
    engine = here.settled(forget=True)

    def source_of() -> StockSource:
        state = state_by_index(here.groups, state_dict)
        return StockSource(engine.layout, here.parameters(), state)

    source = here.ranks.each(source_of)
    put_values(here.groups, kept_values(state_dict["param_groups"]))
    for group in here.groups:
        group["decoupled_weight_decay"] = here.kind == "AdamW"  # like torch
        check_values(group)
    here.replace(source, updates)


def state_by_index(
    groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]
) -> dict[int, Mapping[str, torch.Tensor]]:
    """Return the state of a state_dict of torch by the index of each of our parameters.

    Raises UsageError when the groups have other sizes, or are those of another optimizer.
    """
    sizes = [len(group["params"]) for group in groups]
    given = [len(group["params"]) for group in state_dict["param_groups"]]
    if sizes != given:
        raise UsageError(f"the state has groups of {given} parameters; the optimizer has {sizes}")
    if any("betas" not in group for group in state_dict["param_groups"]):
        raise UsageError("the state is not that of torch.optim.AdamW or Adam: it has no betas")
    order = [index for group in state_dict["param_groups"] for index in group["params"]]
    state = state_dict["state"]
    return {ours: state[theirs] for ours, theirs in enumerate(order) if theirs in state}


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
    fill_parameters(store, record, made)
    return {spec.name: tensor for spec, tensor in zip(specs, made, strict=True)}


def _state_dict(store: GenerationStore, record: GenerationRecord) -> dict[str, Any]:
    specs = store.layout.parameters
    groups = []
    for number, values in enumerate(record.groups):
        own = [index for index, spec in enumerate(specs) if spec.group == number]
        names = [specs[index].name for index in own]
        betas = {"betas": tuple(values["betas"])} if "betas" in values else {}
        groups.append({**values, **betas, "params": own, "param_names": names})
    return {"state": stock_state(store, record), "param_groups": groups}
