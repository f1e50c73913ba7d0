"""AdamW and Adam whose state is on storage: torch optimizers, and every step is a checkpoint."""

from __future__ import annotations

import io
import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch.optim.optimizer import Optimizer, ParamsT

from iobench.errors import OptionError, StateError, UsageError
from iobench.offload.adam import TENSORS, AdamUpdate
from iobench.offload.groups import check_values, defaults_of, kept_values, put_values, specs_of
from iobench.offload.layout import Layout
from iobench.offload.restore import Restored, Wanted, restore
from iobench.offload.stock import Replacement, packed_groups, state_by_index, stock_state
from iobench.offload.store import GenerationStore
from iobench.offload.stream import Stream, Update
from iobench.offload.writing import Commit
from iobench.units import parse_size
from iobench.writers.blocks import interpreter_end
from iobench.writers.direct.uring_queue import open_ring

__all__ = ["Adam", "AdamW"]

_MEMORY = "2GiB"
_IODEPTH, _BLOCK_SIZE = 8, "4MiB"


class AdamW(Optimizer):
    """torch.optim.AdamW with fp32 master weights and moments in files of `directory`.

    Its results have the same bits as `torch.optim.AdamW(fused=True)` on fp32 master weights, whose
    gradients are those of the parameters. Parameters are bfloat16, float16 or float32.

    `step` streams the state through `memory` bytes: it reads chunk k+1 while it updates chunk k and
    writes chunk k-1. It overwrites nothing that is needed: a step writes a new generation, and the
    one before is intact until the new one is durable. `directory` holds `pins` + 2 generations, of
    12 bytes and the parameter's own bytes for each element. They are reserved at construction.

    Raises OptionError and UsageError for wrong arguments, TargetError when `directory` holds a
    training already, is in use, cannot be written or has too little space, and UnavailableError
    without direct I/O or io_uring. After a failure of storage every call raises TransferError, and
    `resume` continues from what is durable.
    """

    _decoupled: ClassVar[bool] = True
    _weight_decay: ClassVar[float] = 1e-2
    _stream: Stream | None = None

    def __init__(
        self,
        params: ParamsT,
        directory: str | os.PathLike[str],
        *,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        maximize: bool = False,
        memory: str | int = _MEMORY,
        pins: int = 1,
        max_lag: int = 1,
        chunk_elements: int | None = None,
        iodepth: int = _IODEPTH,
        block_size: str | int = _BLOCK_SIZE,
    ) -> None:
        """`pins`: how many pinned generations are kept. `max_lag`: how many steps the newest
        durable generation may be behind when `step` returns; with 0 each step is durable on return.
        `chunk_elements`: elements that are read, updated and written together; by default as many
        as fit `memory` five times, at most 4 Mi. `iodepth`: blocks of `block_size` in flight in
        each direction."""
        values = {"lr": lr, "betas": betas, "eps": eps, "maximize": maximize}
        decay = self._weight_decay if weight_decay is None else weight_decay
        self._prepare(params, {**values, "weight_decay": decay}, memory, max_lag)
        self._set_speed(iodepth, block_size)
        if pins < 0:
            raise OptionError(f"pins={pins}: 0 or more")
        layout = Layout.plan(
            specs_of(self.param_groups),
            tensors=TENSORS,
            pins=pins,
            memory_bytes=self._memory_bytes,
            chunk_elements=chunk_elements,
        )
        self._attach(GenerationStore.create(Path(directory), layout))

    @classmethod
    def resume(
        cls,
        params: ParamsT,
        directory: str | os.PathLike[str],
        *,
        step: Wanted = "latest",
        verify: bool = False,
        memory: str | int = _MEMORY,
        max_lag: int = 1,
        iodepth: int = _IODEPTH,
        block_size: str | int = _BLOCK_SIZE,
    ) -> Self:
        """Continue the training in `directory`: fill `params`, and take the values of all groups.

        `step` is the step of a pin, "pinned" (the newest pin) or "latest" (the newest generation).
        Only the parameters are read, 2 of 14 bytes for 16-bit ones. The first `step` reads the rest
        and compares it with its checksums; with `verify` that is done here. A damaged generation is
        marked and passed over with a RuntimeWarning, unless `step` is a number. `restored` says
        what was taken.

        Raises StateMismatchError for another model, TargetError for a directory without a state or
        in use, UsageError for an unknown step, DataMismatchError when nothing whole is left.
        """
        optimizer = cls.__new__(cls)
        values = {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "maximize": False}
        optimizer._prepare(params, {**values, "weight_decay": 0.0}, memory, max_lag)
        optimizer._set_speed(iodepth, block_size)
        specs = specs_of(optimizer.param_groups)
        store = GenerationStore.open(Path(directory))
        try:
            store.layout.check_same(specs, str(directory))
            optimizer._check_kind(store)
            parameters = optimizer._parameters()
            speed = optimizer._speed
            record, restored = restore(store, parameters, step, verify=verify, **speed)
        except BaseException:
            store.close()
            raise
        put_values(optimizer.param_groups, record.groups)
        optimizer.restored = restored
        optimizer.updates = record.updates
        optimizer._attach(store, record.counts)
        return optimizer

    def _prepare(
        self, params: ParamsT, values: Mapping[str, Any], memory: str | int, max_lag: int
    ) -> None:
        super().__init__(params, defaults_of(**values, decoupled=self._decoupled))
        for group in self.param_groups:
            check_values(group)
        if max_lag < 0:
            raise OptionError(f"max_lag={max_lag}: 0 or more steps")
        self._memory_bytes, self._max_lag = parse_size(memory, "memory"), max_lag
        self.updates = 0
        """Calls of `step` so far, also of the trainings that were continued."""
        self.restored: Restored | None = None
        """What `resume` has taken; None for a new training."""

    def _check_kind(self, store: GenerationStore) -> None:
        newest = store.newest
        if newest and newest.groups[0]["decoupled_weight_decay"] != self._decoupled:
            other = Adam if self._decoupled else AdamW
            raise UsageError(f"{store.directory} has the state of {other.__name__}: use its resume")

    def _set_speed(self, iodepth: int, block_size: str | int) -> None:
        if iodepth < 1:
            raise OptionError(f"iodepth={iodepth}: at least 1")
        size = parse_size(block_size, "block_size")
        if not size or size % 4096:
            raise OptionError(f"block_size={block_size}: a multiple of 4096 bytes")
        self._speed = {"iodepth": iodepth, "block_size": size}
        open_ring(iodepth).close()  # fails here where there is none, before anything is made

    def _attach(self, store: GenerationStore, counts: Any = None) -> None:
        """Start the engine on `store`; close the store if that fails."""
        try:
            layout = store.layout
            buffers = min(layout.buffers(self._memory_bytes), max(2, layout.chunks))
            if buffers < 2:
                raise OptionError(f"memory={self._memory_bytes}: too small for two chunks")
            self._counts = np.zeros(len(layout.parameters), np.uint64) if counts is None else counts
            self._scratch = torch.empty(layout.chunk_elements, dtype=torch.float32)
            self._generation = store.last_generation
            self._note_versions()
            self._store = store
            self._stream = Stream(store, buffers=buffers, **self._speed)
        except BaseException:
            store.close()
            raise
        # An optimizer that is dropped without `close` must not keep threads, memory and the lock.
        self._abandoned = weakref.finalize(self, _end, self._stream, store)
        self._abandoned.atexit = False
        interpreter_end.at_end(self, AdamW.close)

    # Training.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; return the result of `closure`.

        On return the parameters are new. The state of at most `max_lag` steps is still on its way
        to storage; `durable` says which steps are there. Raises TransferError or DataMismatchError
        when storage failed: the parameters may be of two steps then, so continue with `resume`.
        """
        stream = self._running()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = self._parameters()
        if not any(parameter.grad is not None for parameter in parameters):
            return loss
        adopted = [p._version != seen for p, seen in zip(parameters, self._versions, strict=True)]
        update = AdamUpdate(
            self._store.layout,
            parameters,
            self.param_groups,
            [int(count) for count in self._counts],
            adopted,
            self._scratch,
        )
        updated = np.array([p.grad is not None for p in parameters], dtype=np.uint64)
        self._pass_over(stream, update, self._counts + updated, self.updates + 1)
        return loss

    def _pass_over(self, stream: Stream, update: Update, counts: Any, updates: int) -> None:
        """Write the next generation by `update`, and wait as `max_lag` asks."""
        groups = kept_values(self.param_groups)
        generation = self._generation + 1
        stream.run(update, generation=generation, updates=updates)
        self._generation, self._counts, self.updates = generation, counts, updates
        self._note_versions()
        stream.commit(Commit(generation=generation, updates=updates, counts=counts, groups=groups))
        stream.wait_for(lambda: self._durable_generation() >= generation - self._max_lag)

    def _durable_generation(self) -> int:
        newest = self._store.newest
        return newest.generation if newest else 0

    # Checkpoints.

    def durable(self) -> int:
        """Return how many calls of `step` the newest generation on storage includes."""
        self._running()
        newest = self._store.newest
        return newest.updates if newest else 0

    def pin(self, step: int, extra: Any = None) -> None:
        """Keep the state after the last `step` as the checkpoint `step`; copies and waits for
        nothing.

        It is durable after `wait`. `extra` is kept with it: tensors, numbers, texts and containers
        of them (what `torch.load(weights_only=True)` accepts). Once this pin is durable, the oldest
        of more than `pins` is given up. Raises UsageError before the first `step`, StateError for
        other values.
        """
        stream = self._running()
        if not self._store.layout.pins:
            raise UsageError("pins=0: no generation can be pinned; construct with pins=1 or more")
        if not self._generation:
            raise UsageError(f"step {step}: nothing to pin before the first call of step()")
        stream.pin(step, None if extra is None else _saved(extra))

    def wait(self, step: int | None = None) -> None:
        """Wait until all steps and pins so far are durable.

        Raises UsageError when `step` is not the step of a kept pin, TransferError after a failure.
        """
        self._running().wait()
        if step is not None and step not in self.pinned():
            raise UsageError(f"step {step} is not pinned; pinned: {self.pinned()}")

    def pinned(self) -> list[int]:
        """Return the steps of the pins that are durable, in the order of their pinning."""
        self._running()
        return [pin.step for pin in self._store.pins]

    # The state as torch has it.

    def state_dict(self) -> dict[str, Any]:
        """Return the state_dict of torch.optim.AdamW, read from storage into memory and verified.

        A 16-bit parameter has its fp32 weights as `master` too; torch ignores it. Waits until all
        steps are durable.
        """
        self.wait()
        record = self._store.base
        state = {} if record is None else stock_state(self._store, record, **self._speed)
        return {"state": state, "param_groups": packed_groups(self.param_groups)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the state and the groups of a torch.optim.AdamW, or of `state_dict`.

        It is a new generation, durable on return. Master weights are `master` where the state has
        it, else the values of the model. Raises UsageError or StateError when it does not fit.
        """
        stream = self._running()
        state = state_by_index(self.param_groups, state_dict)
        put_values(self.param_groups, kept_values(state_dict["param_groups"]))
        for group in self.param_groups:
            group["decoupled_weight_decay"] = self._decoupled  # like torch
            check_values(group)
        replacement = Replacement(self._store.layout, self._parameters(), state)
        self._pass_over(stream, replacement, replacement.counts, self.updates)
        self.wait()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the optimizer is constructed. Raises UsageError later: the files have
        their size then."""
        if self._stream is not None:
            raise UsageError("a group cannot be added to offloaded state; construct with all of it")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError("offloaded state cannot be copied or pickled; use state_dict or resume")

    # The end.

    def close(self) -> None:
        """Wait until all steps and pins are durable, end the threads and release the directory.

        Raises TransferError when some did not become durable. A second call does nothing.
        """
        stream, self._stream = self._stream, None
        if stream is None:
            return
        self._abandoned.detach()
        try:
            stream.wait()
        finally:
            _end(stream, self._store)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _running(self) -> Stream:
        if self._stream is None:
            raise UsageError("the optimizer is closed; continue with resume")
        self._stream.raise_failure()
        return self._stream

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _note_versions(self) -> None:
        """Remember torch's counters of changes: a later one means that the trainer has written."""
        self._versions = [parameter._version for parameter in self._parameters()]


class Adam(AdamW):
    """torch.optim.Adam with its state on storage: weight decay is added to the gradient."""

    _decoupled = False
    _weight_decay = 0.0


def _end(stream: Stream, store: GenerationStore) -> None:
    try:
        stream.close()
    finally:
        store.close()


def _saved(extra: Any) -> bytes:
    file = io.BytesIO()
    torch.save(extra, file)
    file.seek(0)
    try:
        torch.load(file, weights_only=True)
    except Exception as error:
        raise StateError(
            f"extra cannot be loaded again with weights_only: {str(error).splitlines()[0]}"
        ) from error
    return file.getvalue()
