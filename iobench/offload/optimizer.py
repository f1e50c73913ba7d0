"""OffloadedOptimizer: what all optimizers have whose state is on storage."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from iobench.errors import OptionError, UsageError
from iobench.offload.early import EarlyUpdates
from iobench.offload.engine import Engine, EngineOptions
from iobench.offload.groups import check_values, kept_values, put_values, specs_of
from iobench.offload.held_pins import HeldPins, check_free
from iobench.offload.layout import StateLayout
from iobench.offload.model import TrainerModel, check_dense
from iobench.offload.restore import Restored, Wanted, open_state, saved_extra
from iobench.offload.rings import warn_without_io_uring
from iobench.offload.stock import Replacement, packed_groups, state_by_index, stock_state
from iobench.offload.storage import EngineName, check_engine, start_engine
from iobench.offload.store import GenerationStore
from iobench.writers.blocks import interpreter_end

__all__ = ["OffloadedOptimizer"]

_MEMORY = "2GiB"
_IODEPTH, _BLOCK_SIZE = 8, "4MiB"


class OffloadedOptimizer(Optimizer):
    """A torch optimizer with fp32 master weights and state in files of `directory`.

    Its results have the same bits as those of the stock optimizer with `fused=True` on fp32 master
    weights, whose gradients are those of the parameters. Parameters are bfloat16, float16 or
    float32.

    `step` streams the state through `memory` bytes: it reads chunk k+1 while it updates chunk k and
    writes chunk k-1. It overwrites nothing that is needed: a step writes a new generation, and the
    one before is intact until the new one is durable. `directory` holds `pins` + 2 generations: 4
    bytes for each fp32 tensor and the parameter's own bytes, for each element. They are reserved at
    construction.

    Raises OptionError and UsageError for wrong arguments, TargetError when `directory` holds a
    training already, is in use, cannot be written or has too little space, and UnavailableError
    without direct I/O. Without io_uring, threads read and write, with a RuntimeWarning. After a
    failure of storage every call raises TransferError, and `resume` continues from what is durable.
    """

    _kind: ClassVar[str]
    _engine: Engine | None = None
    _early: EarlyUpdates | None = None
    restored: Restored | None = None
    """What `resume` has taken; None for a new training."""

    def __init__(
        self,
        params: ParamsT,
        directory: str | os.PathLike[str],
        defaults: dict[str, Any],
        *,
        memory: str | int = _MEMORY,
        engine: EngineName = "thread",
        pins: int = 1,
        max_lag: int = 1,
        overlap: bool = False,
        chunk_elements: int | None = None,
        iodepth: int = _IODEPTH,
        block_size: str | int = _BLOCK_SIZE,
        clone_pins: bool = False,
    ) -> None:
        """`engine`: "thread", or "process" for an engine in a process of its own, which has less
        priority than the trainer and needs shared memory for three chunks in addition to `memory`.
        `pins`: how many pinned generations are kept. `max_lag`: how many steps the newest
        durable generation may be behind when `step` returns; with 0 each step is durable on return.
        `overlap`: update chunks while backward still makes the gradients of others; takes memory
        for a second copy of the parameters. `chunk_elements`: elements that are read, updated and
        written together; by default as many as fit `memory` five times, at most 4 Mi. `iodepth`:
        blocks of `block_size` in flight in each direction. `clone_pins`: reserve two generations
        only, and let pins share blocks with them (xfs, btrfs). A pin takes space when the next
        steps are written, so a full disk is an error of `step` then. Where files cannot share
        blocks, slots are reserved, with a RuntimeWarning."""
        self._prepare(params, defaults)
        options = EngineOptions.parse(memory, iodepth, block_size, max_lag)
        check_engine(engine)
        if pins < 0:
            raise OptionError(f"pins={pins}: 0 or more")
        layout = StateLayout.plan(
            specs_of(self.param_groups),
            tensors=self._tensors(),
            pins=pins,
            memory_bytes=options.memory_bytes,
            chunk_elements=chunk_elements,
            clones=clone_pins,
        )
        warn_without_io_uring(iodepth)
        self._attach(GenerationStore.create(Path(directory), layout), options, engine, overlap)

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
        optimizer._prepare(params, cls._any_defaults())
        options = EngineOptions.parse(memory, iodepth, block_size, max_lag)
        check_engine(engine)
        optimizer._continue(Path(directory), step, options, engine, overlap, verify=verify)
        return optimizer

    def _continue(
        self,
        directory: Path,
        step: Wanted,
        options: EngineOptions,
        engine: EngineName,
        overlap: bool,
        *,
        verify: bool = False,
    ) -> None:
        """Go on from the state in `directory`; see `resume`."""
        warn_without_io_uring(options.iodepth)
        store, self.restored = open_state(
            directory, self.param_groups, self._kind, step, verify=verify, **options.speed
        )
        self._attach(store, options, engine, overlap)

    @classmethod
    def _any_defaults(cls) -> dict[str, Any]:
        """Valid values of a group, which `resume` replaces."""
        raise NotImplementedError

    def _tensors(self) -> tuple[str, ...]:
        """The fp32 tensors of each parameter; see kernels."""
        raise NotImplementedError

    def _values(self) -> list[dict[str, Any]]:
        """The values of the groups for the next step. Raises UsageError, StateError."""
        return kept_values(self.param_groups)

    def _prepare(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        for group in self.param_groups:
            check_values(group)
        self._held: set[str] = set()  # pins of a Checkpointer, also those not durable yet

    def _attach(
        self, store: GenerationStore, options: EngineOptions, kind: EngineName, overlap: bool
    ) -> None:
        """Start the engine on `store`, which is closed if that fails."""
        self._note_versions()
        self._attached = store.directory.absolute(), options, kind, overlap
        engine = start_engine(kind, store, options)
        self._engine = engine
        early = EarlyUpdates(engine, self.param_groups, self._versions) if overlap else None
        self._early = early
        # An optimizer that is dropped without `close` must not keep threads, memory and the lock.
        self._abandoned = weakref.finalize(self, _abandon, engine, early)
        self._abandoned.atexit = False
        interpreter_end.at_end(self, OffloadedOptimizer._at_end)

    # Training.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; return the result of `closure`.

        With `overlap`, chunks that were updated during backward count if their gradients and the
        values of the groups are still the same, and are updated again if not.
        On return the parameters are new. The state of at most `max_lag` steps is still on its way
        to storage; `durable` says which steps are there. Without any gradient nothing happens.
        Raises TransferError or DataMismatchError when storage failed: the parameters may be of two
        steps then, so continue with `resume`.
        """
        self._running()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = self._parameters()
        if any(parameter.grad is not None for parameter in parameters):
            self._update(parameters, self._values())
        return loss

    def _update(self, parameters: list[torch.Tensor], values: list[dict[str, Any]]) -> None:
        engine, early = self._running(), self._early
        check_dense(engine.layout, parameters)
        model = TrainerModel(parameters, self._versions)
        if early is None:
            engine.step(model, values)
            self._note_versions()
            return
        done = early.finish(values)
        engine.step(model, values, early=done, then=early.order)
        early.install(done)
        self._note_versions()
        early.next(self._versions, done)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """For backward calls whose gradients are not final yet: with `overlap`, nothing is updated
        inside. Use it around all but the last one of a step."""
        if self._early is None:
            yield
        else:
            with self._early.ignoring():
                yield

    @property
    def updates(self) -> int:
        """Calls of `step` so far, also of the trainings that were continued."""
        return self._settled().progress().updates

    # Checkpoints.

    def durable(self) -> int:
        """Return how many calls of `step` the newest generation on storage includes."""
        return self._settled().progress().durable_updates

    def pin(self, step: int, extra: Any = None) -> None:
        """Keep the state after the last `step` as the checkpoint `step`; copies and waits for
        nothing.

        It is durable after `wait`. The values of the groups are kept as they are now, after the
        schedulers; a generation without a pin has those of its `step`. `extra` is kept too:
        tensors, numbers, texts and containers of them (what `torch.load(weights_only=True)`
        accepts). Once this pin is durable, the oldest of more than `pins` is given up. Raises
        UsageError before the first `step`, StateError for other values.
        """
        engine = self._settled()
        if not engine.layout.pins:
            raise UsageError("pins=0: no generation can be pinned; construct with pins=1 or more")
        check_free(self._held, engine)
        saved = None if extra is None else saved_extra(extra)
        engine.pin(step, saved, kept_values(self.param_groups))

    def checkpoint_pins(self) -> HeldPins:
        """Return the pins that a `Checkpointer(..., offload=optimizer)` holds."""
        return HeldPins(self)

    def _begin_history(self, name: str) -> None:
        """Name the states after this call; for the ranks of a job. See StateName."""
        self._settled().begin_history(name)

    def wait(self, step: int | None = None) -> None:
        """Wait until all steps and pins so far are durable.

        Raises UsageError when `step` is not the step of a kept pin, TransferError after a failure.
        """
        self._settled().wait()
        if step is not None and step not in self.pinned():
            raise UsageError(f"step {step} is not pinned; pinned: {self.pinned()}")

    def pinned(self) -> list[int]:
        """Return the steps of the pins that are durable, in the order of their pinning."""
        return list(self._settled().progress().pinned)

    # The state as torch has it.

    def state_dict(self) -> dict[str, Any]:
        """Return the state_dict of the stock optimizer, read from storage into memory and verified.

        A 16-bit parameter has its fp32 weights as `master` too; torch ignores it. Waits until all
        steps are durable.
        """
        engine = self._settled(forget=True)
        engine.wait()
        with engine.local() as here:
            record = here.store.base
            state: dict[int, Any] = {}
            if record is not None:
                state = stock_state(here.store, record, **here.options.speed)
        return {"state": state, "param_groups": packed_groups(self.param_groups)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the state and the groups of the stock optimizer, or of `state_dict`.

        It is a new generation, durable on return. Master weights are `master` where the state has
        it, else the values of the model. Raises UsageError or StateError when it does not fit.
        """
        engine = self._settled(forget=True)
        state = state_by_index(self.param_groups, state_dict)
        replacement = Replacement(engine.layout, self._parameters(), state)
        put_values(self.param_groups, kept_values(state_dict["param_groups"]))
        for group in self.param_groups:
            self._after_load(group)
            check_values(group)
        groups = kept_values(self.param_groups)
        updates, self.restored = self.updates, None  # another state is here
        with engine.local() as here:
            here.write_generation(replacement, groups, replacement.counts, updates)
            here.wait()
        self._note_versions()
        if self._early is not None:
            self._early.next(self._versions, ())

    def _after_load(self, group: dict[str, Any]) -> None:
        """Correct the values of a group that were loaded."""

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
            if self._early is not None:
                self._early.close()
            engine.close()

    def _at_end(self) -> None:
        """The interpreter ends: finish, or fail unless the trainer knows already."""
        if self._engine is not None and self._engine.reported:
            _abandon(self._engine, self._early)
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

    def _settled(self, *, forget: bool = False) -> Engine:
        """The engine, when it does not work on the next step."""
        engine = self._running()
        if self._early is not None:
            if forget:
                self._early.forget()
            else:
                self._early.stop()
        return engine

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _note_versions(self) -> None:
        """Remember torch's counters of changes: a later one means that the trainer has written."""
        self._versions = [parameter._version for parameter in self._parameters()]


def _abandon(engine: Engine, early: EarlyUpdates | None) -> None:
    if early is not None:
        early.close()
    engine.abandon()
