"""AdamW and Adam whose state is on storage, where every step is a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from iobench.checkpoint.place import SaveParticipant
from iobench.errors import OptionError, UsageError
from iobench.offload.convert import load_state, state_dict_of
from iobench.offload.engine import EngineOptions
from iobench.offload.files import warn_without_io_uring
from iobench.offload.layout import Pin
from iobench.offload.parameters import DEFAULTS, check_values, kind_of
from iobench.offload.restore import Restored, Wanted, saved_extra
from iobench.offload.state import OptimizerState

_MEMORY = "2GiB"
_IODEPTH, _BLOCK_SIZE = 8, "4MiB"


class AdamW(Optimizer):
    """torch.optim.AdamW with fp32 master weights and moments in files of `directory`.

    Its results have the same bits as those of the stock optimizer with `fused=True` on fp32 master
    weights, whose gradients are those of the parameters. Parameters are bfloat16, float16 or
    float32.

    `step` streams the state through `memory` bytes: it reads chunk k+1 while it updates chunk k and
    writes chunk k-1. It overwrites nothing that is needed: a step writes a new generation, and the
    one before is intact until the new one is durable. `directory` holds `pins` + 2 generations: 4
    bytes for each fp32 tensor and the parameter's own bytes, for each element. They are reserved at
    construction.

    Parameters that are DTensors (FSDP2): each rank keeps its local shards in a directory of its own
    below `directory`. All ranks of torch's default process group call the same methods; a failure
    in one of them is a RankError in the others.

    Raises OptionError and UsageError for wrong arguments, TargetError when `directory` holds a
    training already, is in use, cannot be written or has too little space, and UnavailableError
    without direct I/O. Without io_uring, threads read and write, with a RuntimeWarning. After a
    failure of storage every call raises TransferError, and `resume` continues from what is durable.
    """

    _decoupled: ClassVar[bool] = True
    _weight_decay: ClassVar[float] = 1e-2
    _state: OptimizerState | None = None

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
        max_backlog: int = 1,
        overlap: bool = False,
        chunk_elements: int | None = None,
        iodepth: int = _IODEPTH,
        block_size: str | int = _BLOCK_SIZE,
    ) -> None:
        """Values up to `maximize` are those of the stock class. `pins`: how many pinned generations
        are kept. `max_backlog`: how many steps the newest durable generation may be behind when
        `step` returns; with 0 each step is durable on return. `overlap`: update chunks while
        backward still makes the gradients of others; takes memory for a second copy of the
        parameters.
        `chunk_elements`: elements that are read, updated and written together; by default as many
        as fit `memory` five times, at most 4 Mi. `iodepth`: blocks of `block_size` in flight, of
        reads, and of writes to each of the two files."""
        options = EngineOptions.parse(memory, iodepth, block_size, max_backlog)
        if pins < 0:
            raise OptionError(f"pins={pins}: 0 or more")
        decay = self._weight_decay if weight_decay is None else weight_decay
        values = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay, "maximize": maximize}
        state = self._prepare(params, values, directory, options, overlap=overlap)
        warn_without_io_uring(iodepth)
        state.create(pins=pins, chunk_elements=chunk_elements)
        self._state = state

    @classmethod
    def resume(
        cls,
        params: ParamsT,
        directory: str | os.PathLike[str],
        *,
        step: Wanted = "latest",
        verify: bool = False,
        memory: str | int = _MEMORY,
        max_backlog: int = 1,
        overlap: bool = False,
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
        options = EngineOptions.parse(memory, iodepth, block_size, max_backlog)
        # torch fills in the given dicts: after an error they would have other values.
        own: Any = [dict(one) if isinstance(one, dict) else one for one in params]
        state = optimizer._prepare(own, {}, directory, options, overlap=overlap)
        warn_without_io_uring(iodepth)
        state.resume(step, verify=verify)
        optimizer._state = state
        return optimizer

    def _prepare(
        self,
        params: ParamsT,
        values: Mapping[str, Any],
        directory: str | os.PathLike[str],
        options: EngineOptions,
        *,
        overlap: bool,
    ) -> OptimizerState:
        decoupled = {"decoupled_weight_decay": self._decoupled}
        defaults = {**DEFAULTS, **values, **decoupled}
        super().__init__(params, defaults)
        for group in self.param_groups:
            check_values(group)
        return OptimizerState(
            self.param_groups, kind_of(defaults), Path(directory), options, overlap=overlap
        )

    @property
    def restored(self) -> Restored | None:
        """What `resume` has taken; None for a new training."""
        return self._open_state().restored

    # Training.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; return the result of `closure`.

        With `overlap`, chunks that were updated during backward count if their gradients and the
        values of the groups are still the same, and are updated again if not.
        On return the parameters are new. The state of at most `max_backlog` steps is still on its
        way to storage; `durable` says which steps are there. Without any gradient nothing happens.
        Raises TransferError or DataMismatchError when storage failed: the parameters may be of two
        steps then, so continue with `resume`.
        """
        state = self._open_state()
        state.running()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        state.step()
        return loss

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """For backward calls whose gradients are not final yet: with `overlap`, nothing is updated
        inside. Use it around all but the last one of a step."""
        early = self._open_state().early
        if early is None:
            yield
        else:
            with early.ignoring():
                yield

    @property
    def updates(self) -> int:
        """Calls of `step` so far, also of the trainings that were continued."""
        return self._open_state().settled().updates

    # Checkpoints.

    def durable(self) -> int:
        """Return how many calls of `step` the newest generation of this rank on storage has."""
        newest = self._open_state().settled().store.newest
        return newest.updates if newest else 0

    def pin(self, step: int, extra: Any = None) -> None:
        """Keep the state after the last `step` as the checkpoint `step`; copies and waits for
        nothing.

        It is durable after `wait`. The values of the groups are kept as they are now, after the
        schedulers; a generation without a pin has those of its `step`. `extra` is kept too:
        tensors, numbers, texts and containers of them (what `torch.load(weights_only=True)`
        accepts), 256 KiB at most. Once this pin is durable, the oldest of more than `pins` is given
        up. Raises UsageError before the first `step`, StateError for other values.
        """
        state = self._open_state()
        if not state.running().layout.pins:
            raise UsageError("pins=0: no generation can be pinned; construct with pins=1 or more")
        state.pin(Pin(step), b"" if extra is None else saved_extra(extra))

    def save_participant(self) -> SaveParticipant:
        """Return what takes part in the saves of a `Checkpointer(..., offload=optimizer)`."""
        from iobench.offload.saves import (
            PinLedger,  # here: it takes time to import
            ShardedSaves,
        )

        state = self._open_state()
        return ShardedSaves(state) if state.ranks.sharded else PinLedger(state)

    def wait(self, step: int | None = None) -> None:
        """Wait until all steps and pins so far are durable.

        Raises UsageError when `step` is not the step of a kept pin, TransferError after a failure.
        """
        self._open_state().settled().wait()
        if step is not None and step not in self.pinned():
            raise UsageError(f"step {step} is not pinned; pinned: {self.pinned()}")

    def pinned(self) -> list[int]:
        """Return the steps of the pins that are durable, in the order of their pinning."""
        return [pin.step for pin in self._open_state().settled().store.pins]

    # The state as torch has it.

    def state_dict(self) -> dict[str, Any]:
        """Return the state_dict of the stock optimizer, read from storage into memory and verified.

        A 16-bit parameter has its fp32 weights as `master` too; torch ignores it. Waits until all
        steps are durable.
        """
        return state_dict_of(self._open_state())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the state and the groups of the stock optimizer, or of `state_dict`.

        It is a new generation, durable on return. Master weights are `master` where the state has
        it, else the values of the model. Raises UsageError or StateError when it does not fit.
        """
        load_state(self._open_state(), state_dict, self.updates)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the optimizer is constructed. Raises UsageError later: the files have
        their size then."""
        if self._state is not None:
            raise UsageError("a group cannot be added to offloaded state; construct with all of it")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError("offloaded state cannot be copied or pickled; use state_dict or resume")

    # The end.

    def close(self) -> None:
        """Wait until all steps and pins are durable, end the engine and release the directory.

        Raises TransferError when some did not become durable. A second call does nothing.
        """
        if self._state is not None:
            self._state.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_state(self) -> OptimizerState:
        assert self._state is not None  # `create` or `resume` has not failed
        return self._state


class Adam(AdamW):
    """torch.optim.Adam with its state on storage: weight decay is added to the gradient."""

    _decoupled = False
    _weight_decay = 0.0
