"""The state as the stock optimizers have it: read from a generation, or put into the next one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from iobench.errors import StateError, UsageError
from iobench.offload.buffers import ChunkBuffer
from iobench.offload.groups import kind_of
from iobench.offload.kernels import ADAM
from iobench.offload.layout import StateLayout
from iobench.offload.model import flat_view, place
from iobench.offload.reading import read_state
from iobench.offload.record import GenerationRecord
from iobench.offload.store import GenerationStore
from iobench.writers.image import Bytes

__all__ = ["Replacement", "packed_groups", "state_by_index", "stock_state"]


def stock_state(
    store: GenerationStore, record: GenerationRecord, *, iodepth: int, block_size: int
) -> dict[int, dict[str, torch.Tensor]]:
    """Return the `state` of the stock optimizer by the index of each parameter; verified.

    With Adam each has `step`, `exp_avg` and `exp_avg_sq`, with SGD `momentum_buffer` if its group
    has a momentum; a 16-bit parameter also has `master`: its fp32 weights. Parameters that were
    never updated have none, as in torch. Takes as much memory. Raises DataMismatchError,
    TransferError.
    """
    layout = store.layout
    state: dict[int, dict[str, torch.Tensor]] = {}
    for index, spec in enumerate(layout.parameters):
        if record.counts[index]:
            kinds = list(layout.tensors[1:]) if _has_state(record.groups[spec.group]) else []
            kinds += [] if spec.dtype == "float32" else [layout.tensors[0]]
            made = {kind: torch.empty(spec.shape, dtype=torch.float32) for kind in kinds}
            if layout.tensors == ADAM:
                made = {"step": torch.tensor(float(record.counts[index])), **made}
            if made:
                state[index] = made

    def deliver(chunk: int, data: Bytes) -> None:
        parts = torch.from_numpy(data).view(torch.float32).split(layout.elements(chunk))
        for piece in layout.pieces(chunk):
            made = state.get(piece.parameter, {})
            for name, part in zip(layout.tensors, parts, strict=True):
                if name in made:
                    flat_view(made[name])[piece.begin : piece.end].copy_(place(piece, part))

    read_state(store, record, deliver, iodepth=iodepth, block_size=block_size)
    return state


def _has_state(group: Mapping[str, Any]) -> bool:
    return kind_of(group) != "SGD" or bool(group["momentum"])


def packed_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return `param_groups` of a state_dict: parameters are replaced by their indices."""
    packed, start = [], 0
    for group in groups:
        count = len(group["params"])
        values = {name: value for name, value in group.items() if name != "params"}
        packed.append({**values, "params": list(range(start, start + count))})
        start += count
    return packed


class Replacement:
    """Puts a stock `state` into a generation. Call it with each chunk once.

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
        self._layout, self._parameters, self._state = layout, parameters, state
        unknown = [index for index in state if index not in range(len(parameters))]
        if unknown:
            raise StateError(f"the state has parameters {unknown}; there are {len(parameters)}")
        for index, values in state.items():
            name = layout.parameters[index].name
            for kind in layout.tensors:
                if values.get(kind) is not None and values[kind].shape != parameters[index].shape:
                    raise StateError(
                        f"{kind} of parameter {name} has the shape {list(values[kind].shape)}; "
                        f"the parameter has {list(parameters[index].shape)}"
                    )
            if "max_exp_avg_sq" in values:
                raise StateError(f"parameter {name} has max_exp_avg_sq: amsgrad is not supported")
            adam = ["step", *ADAM[1:]]
            if layout.tensors == ADAM and len({kind in values for kind in adam}) > 1:
                raise StateError(f"parameter {name} lacks step, exp_avg or exp_avg_sq")

    @property
    def counts(self) -> Any:
        """The updates of each parameter."""
        found = [self._count(self._state.get(n, {})) for n in range(len(self._parameters))]
        return np.array(found, dtype=np.uint64)

    def _count(self, values: Mapping[str, torch.Tensor]) -> int:
        if self._layout.tensors == ADAM:
            return int(values.get("step", torch.tensor(0.0)))
        # SGD counts nothing: it only matters whether there is a momentum.
        return int(values.get("momentum_buffer") is not None)

    def __call__(self, buffer: ChunkBuffer) -> bool:
        with torch.no_grad():
            for piece in self._layout.pieces(buffer.chunk):
                values = self._state.get(piece.parameter, {})
                model = flat_view(self._parameters[piece.parameter])[piece.begin : piece.end]
                for kind, tensor in zip(self._layout.tensors, buffer.tensors(), strict=True):
                    own = place(piece, tensor)
                    if values.get(kind) is not None:
                        own.copy_(values[kind].detach().reshape(-1)[piece.begin : piece.end])
                    elif kind == "master":
                        own.copy_(model)
                    else:
                        own.zero_()
                    if kind == "master":
                        model.copy_(own)
                buffer.parameter(piece).copy_(model)
        return True


def state_by_index(
    groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]
) -> dict[int, Mapping[str, torch.Tensor]]:
    """Return the state of a stock state_dict by the index of each of our parameters.

    Raises UsageError when the groups have other sizes, or are those of another optimizer.
    """
    kinds = [kind_of(one["param_groups"][0]) for one in ({"param_groups": groups}, state_dict)]
    if kinds[0] != kinds[1] and "SGD" in kinds:
        raise UsageError(f"the state is that of {kinds[1]}; the optimizer is {kinds[0]}")
    sizes = [len(group["params"]) for group in groups]
    given = [len(group["params"]) for group in state_dict["param_groups"]]
    if sizes != given:
        raise UsageError(f"the state has groups of {given} parameters; the optimizer has {sizes}")
    order = [index for group in state_dict["param_groups"] for index in group["params"]]
    state = state_dict["state"]
    return {ours: state[theirs] for ours, theirs in enumerate(order) if theirs in state}
