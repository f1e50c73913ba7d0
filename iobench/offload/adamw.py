"""AdamW and Adam whose state is on storage: torch optimizers, and every step is a checkpoint."""

from __future__ import annotations

import io
import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from iobench.errors import OptionError, StateError, UsageError
from iobench.offload.adam import TENSORS
from iobench.offload.engine import Engine, EngineOptions, ThreadEngine
from iobench.offload.groups import check_values, defaults_of, kept_values, put_values, specs_of
from iobench.offload.held_pins import HeldPins
from iobench.offload.layout import StateLayout
from iobench.offload.model import TrainerModel
from iobench.offload.process import ProcessEngine
from iobench.offload.restore import Restored, Wanted, restore
from iobench.offload.stock import Replacement, packed_groups, state_by_index, stock_state
from iobench.offload.store import GenerationStore
from iobench.writers.blocks import interpreter_end
from iobench.writers.direct.uring_queue import open_ring

__all__ = ["Adam", "AdamW"]

EngineName = Literal["thread", "process"]

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
    _engine: Engine | None = None
    restored: Restored | None = None
    """What `resume` has taken; None for a new training."""

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
        engine: EngineName = "thread",
        pins: int = 1,
        max_lag: int = 1,
        chunk_elements: int | None = None,
        iodepth: int = _IODEPTH,
        block_size: str | int = _BLOCK_SIZE,
    ) -> None:
        """`engine`: "thread", or "process" for an engine in a process of its own, which has less
        priority than the trainer and needs shared memory for three chunks in addition to `memory`.
        `pins`: how many pinned generations are kept. `max_lag`: how many steps the newest
        durable generation may be behind when `step` returns; with 0 each step is durable on return.
        `chunk_elements`: elements that are read, updated and written together; by default as many
        as fit `memory` five times, at most 4 Mi. `iodepth`: blocks of `block_size` in flight in
        each direction."""
        values = {"lr": lr, "betas": betas, "eps": eps, "maximize": maximize}
        decay = self._weight_decay if weight_decay is None else weight_decay
        self._prepare(params, {**values, "weight_decay": decay})
        options = EngineOptions.parse(memory, iodepth, block_size, max_lag)
        _check_engine(engine)
        if pins < 0:
            raise OptionError(f"pins={pins}: 0 or more")
        layout = StateLayout.plan(
            specs_of(self.param_groups),
            tensors=TENSORS,
            pins=pins,
            memory_bytes=options.memory_bytes,
            chunk_elements=chunk_elements,
        )
        open_ring(iodepth).close()  # fails here where there is none, before anything is made
        self._attach(GenerationStore.create(Path(directory), layout), options, engine)

    @classmethod
    def resume(
        cls,
        params: ParamsT,
        directory: str | os.PathLike[str],
        *,
        step: Wanted = "latest",
        verify: bool = False,
        memory: str | int = _MEMORY,
        engine: EngineName = "thread",
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
        optimizer._prepare(params, {**values, "weight_decay": 0.0})
        options = EngineOptions.parse(memory, iodepth, block_size, max_lag)
        _check_engine(engine)
        optimizer._continue(Path(directory), step, options, engine, verify=verify)
        return optimizer

    def _continue(
        self,
        directory: Path,
        step: Wanted,
        options: EngineOptions,
        engine: EngineName,
        *,
        verify: bool = False,
    ) -> None:
        """Go on from the state in `directory`; see `resume`."""
        specs = specs_of(self.param_groups)
        store = GenerationStore.open(directory)
        try:
            store.layout.check_same(specs, str(directory))
            self._check_kind(store)
            parameters = self._parameters()
            record, restored = restore(store, parameters, step, verify=verify, **options.speed)
            put_values(self.param_groups, record.groups)
        except BaseException:
            store.close()
            raise
        self.restored = restored
        self._attach(store, options, engine)

    def _prepare(self, params: ParamsT, values: Mapping[str, Any]) -> None:
        super().__init__(params, defaults_of(**values, decoupled=self._decoupled))
        for group in self.param_groups:
            check_values(group)
        self._held: set[str] = set()
        """Pins of a Checkpointer, also those that are not durable yet."""

    def _check_kind(self, store: GenerationStore) -> None:
        newest = store.newest
        if newest and newest.groups[0]["decoupled_weight_decay"] != self._decoupled:
            other = Adam if self._decoupled else AdamW
            raise UsageError(f"{store.directory} has the state of {other.__name__}: use its resume")

    def _attach(self, store: GenerationStore, options: EngineOptions, kind: EngineName) -> None:
        """Start the engine on `store`, which is closed if that fails."""
        self._note_versions()
        self._attached = store.directory.absolute(), options, kind
        engine = (
            ProcessEngine(store, options) if kind == "process" else ThreadEngine(store, options)
        )
        self._engine = engine
        # An optimizer that is dropped without `close` must not keep threads, memory and the lock.
        self._abandoned = weakref.finalize(self, engine.abandon)
        self._abandoned.atexit = False
        interpreter_end.at_end(self, AdamW._at_end)

    # Training.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; return the result of `closure`.

        On return the parameters are new. The state of at most `max_lag` steps is still on its way
        to storage; `durable` says which steps are there. Without any gradient nothing happens.
        Raises TransferError or DataMismatchError when storage failed: the parameters may be of two
        steps then, so continue with `resume`.
        """
        engine = self._running()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = self._parameters()
        if any(parameter.grad is not None for parameter in parameters):
            model = TrainerModel(engine.layout, parameters, self._versions)
            engine.step(model, kept_values(self.param_groups))
            self._note_versions()
        return loss

    @property
    def updates(self) -> int:
        """Calls of `step` so far, also of the trainings that were continued."""
        return self._running().progress().updates

    # Checkpoints.

    def durable(self) -> int:
        """Return how many calls of `step` the newest generation on storage includes."""
        return self._running().progress().durable_updates

    def pin(self, step: int, extra: Any = None) -> None:
        """Keep the state after the last `step` as the checkpoint `step`; copies and waits for
        nothing.

        It is durable after `wait`. The values of the groups are kept as they are now, after the
        schedulers; a generation without a pin has those of its `step`. `extra` is kept too:
        tensors, numbers, texts and containers of them (what `torch.load(weights_only=True)`
        accepts). Once this pin is durable, the oldest of more than `pins` is given up. Raises
        UsageError before the first `step`, StateError for other values.
        """
        engine = self._running()
        if not engine.layout.pins:
            raise UsageError("pins=0: no generation can be pinned; construct with pins=1 or more")
        if max(len(self._held), engine.progress().held) >= engine.layout.pins:
            raise UsageError(
                f"all pins={engine.layout.pins} belong to checkpoints of a Checkpointer"
            )
        saved = None if extra is None else _saved(extra)
        engine.pin(step, saved, kept_values(self.param_groups))

    def checkpoint_pins(self) -> HeldPins:
        """Return the pins that a `Checkpointer(..., offload=optimizer)` holds."""
        return HeldPins(self)

    def wait(self, step: int | None = None) -> None:
        """Wait until all steps and pins so far are durable.

        Raises UsageError when `step` is not the step of a kept pin, TransferError after a failure.
        """
        self._running().wait()
        if step is not None and step not in self.pinned():
            raise UsageError(f"step {step} is not pinned; pinned: {self.pinned()}")

    def pinned(self) -> list[int]:
        """Return the steps of the pins that are durable, in the order of their pinning."""
        return list(self._running().progress().pinned)

    # The state as torch has it.

    def state_dict(self) -> dict[str, Any]:
        """Return the state_dict of torch.optim.AdamW, read from storage into memory and verified.

        A 16-bit parameter has its fp32 weights as `master` too; torch ignores it. Waits until all
        steps are durable.
        """
        engine = self._running()
        engine.wait()
        with engine.local() as here:
            record = here.store.base
            state: dict[int, Any] = {}
            if record is not None:
                state = stock_state(here.store, record, **here.options.speed)
        return {"state": state, "param_groups": packed_groups(self.param_groups)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the state and the groups of a torch.optim.AdamW, or of `state_dict`.

        It is a new generation, durable on return. Master weights are `master` where the state has
        it, else the values of the model. Raises UsageError or StateError when it does not fit.
        """
        engine = self._running()
        state = state_by_index(self.param_groups, state_dict)
        replacement = Replacement(engine.layout, self._parameters(), state)
        put_values(self.param_groups, kept_values(state_dict["param_groups"]))
        for group in self.param_groups:
            group["decoupled_weight_decay"] = self._decoupled  # like torch
            check_values(group)
        groups = kept_values(self.param_groups)
        updates = self.updates
        with engine.local() as here:
            here.write_generation(replacement, groups, replacement.counts, updates)
            here.wait()
        self._note_versions()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the optimizer is constructed. Raises UsageError later: the files have
        their size then."""
        if self._engine is not None:
            raise UsageError("a group cannot be added to offloaded state; construct with all of it")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError("offloaded state cannot be copied or pickled; use state_dict or resume")

    # The end.

    def close(self) -> None:
        """Wait until all steps and pins are durable, end the engine and release the directory.

        Raises TransferError when some did not become durable. A second call does nothing.
        """
        engine, self._engine = self._engine, None
        if engine is not None:
            self._abandoned.detach()
            engine.close()

    def _at_end(self) -> None:
        """The interpreter ends: finish, or fail unless the trainer knows already."""
        if self._engine is not None and self._engine.reported:
            self._engine.abandon()
        else:
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _running(self) -> Engine:
        if self._engine is None:
            raise UsageError("the optimizer is closed; continue with resume")
        return self._engine

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _was_written(self) -> bool:
        """Whether the trainer has written to a parameter since the last step."""
        return self._versions != [parameter._version for parameter in self._parameters()]

    def _note_versions(self) -> None:
        """Remember torch's counters of changes: a later one means that the trainer has written."""
        self._versions = [parameter._version for parameter in self._parameters()]


class Adam(AdamW):
    """torch.optim.Adam with its state on storage: weight decay is added to the gradient."""

    _decoupled = False
    _weight_decay = 0.0


def _check_engine(name: str) -> None:
    if name not in ("thread", "process"):
        raise OptionError(f"engine={name!r}: 'thread' or 'process'")


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
