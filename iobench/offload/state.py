"""OptimizerState: the state of an optimizer on storage, its engine, and the parameters it is of."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from iobench.errors import OptionError, RankError, UsageError
from iobench.offload.chunks import ChunkBuffer
from iobench.offload.early import EarlyUpdates
from iobench.offload.engine import Engine, EngineOptions
from iobench.offload.layout import Pin, StateLayout
from iobench.offload.parameters import (
    ShardRanks,
    kept_values,
    kind_of,
    local_gradient,
    put_values,
    specs_of,
)
from iobench.offload.restore import Restored, Wanted, restore
from iobench.offload.store import GenerationStore
from iobench.offload.update import (
    PinnedTransfer,
    TrainerModel,
    check_gradients,
    marks_of,
    place,
    value_of,
)
from iobench.writers.blocks import interpreter_end

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class StateSource(Protocol):
    """The fp32 tensors of all parameters, somewhere."""

    @property
    def counts(self) -> npt.NDArray[np.uint64]:
        """How often each parameter was updated."""

    def read(self, parameter: int, begin: int, into: Sequence[torch.Tensor]) -> None:
        """Fill `into`, one tensor of each kind, with the elements of `parameter` from `begin` on.

        Calls come in the order of the flat state, without gaps. Raises DataMismatchError.
        """


class OptimizerState:
    """What is below a torch optimizer: `groups` are its `param_groups`.

    It is open between `create` or `resume` and `close`. One thread calls its methods.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        kind: str,
        directory: Path,
        options: EngineOptions,
        *,
        overlap: bool,
    ) -> None:
        """`kind`: the name of the optimizer; see `groups.kind_of`."""
        self.groups, self.kind = groups, kind
        self.ranks = ShardRanks(self.parameters())
        if overlap and self.ranks.sharded:
            raise OptionError("overlap=True: not with DTensors; FSDP2 reduces gradients later")
        self.directory = self.ranks.each(lambda: self.ranks.directory(directory.absolute()))
        self._options, self._overlap = options, overlap
        self._transfer = PinnedTransfer()
        self.engine: Engine | None = None
        """For any thread; None while it is closed."""
        self.early: EarlyUpdates | None = None
        """What updates chunks during backward; None without `overlap`."""
        self.restored: Restored | None = None
        """What `resume` has taken; None for a new training."""
        self.held: set[str] = set()
        """Names of the pins of Checkpointers, also of those that are not durable yet."""

    def create(self, *, pins: int, chunk_elements: int | None) -> None:
        """Make the files of a new training. Raises TargetError if there is one."""

        def create() -> GenerationStore:
            layout = StateLayout.plan(
                specs_of(self.groups),
                pins=pins,
                memory_bytes=self._options.memory_bytes,
                chunk_elements=chunk_elements,
            )
            return GenerationStore.create(self.directory, layout, self._options.speed)

        self._attach(self.ranks.each(create))

    def resume(self, wanted: Wanted, *, verify: bool = False) -> None:
        """Go on from a generation, and fill the parameters and groups; the same in all ranks.

        Raises what `restore` raises, StateMismatchError for another model, UsageError for another
        kind, RankError for what another rank has raised.
        """
        opened: list[GenerationStore] = []
        try:
            self.ranks.each(lambda: opened.append(self._opened()))
            (store,) = opened
            record, restored = restore(store, self.parameters(), wanted, self.ranks, verify=verify)
            put_values(self.groups, record.groups)
        except BaseException:
            for one in opened:
                one.close()
            raise
        self.restored = restored
        self._attach(store)

    def _opened(self) -> GenerationStore:
        specs = specs_of(self.groups)
        store = GenerationStore.open(self.directory, self._options.speed)
        try:
            store.layout.check_same(specs, str(self.directory))
            found = store.newest and kind_of(store.newest.groups[0])
            if found and found != self.kind:
                raise UsageError(f"{store.directory} has the state of {found}: use its resume")
        except BaseException:
            store.close()
            raise
        return store

    def reopen(self) -> None:
        """Open the files if they are closed, for work that replaces all of the state."""
        if self.closed:
            self._attach(
                self.ranks.each(lambda: GenerationStore.open(self.directory, self._options.speed))
            )

    def _attach(self, store: GenerationStore) -> None:
        """Start the engine on `store`, which is closed if that fails."""
        self._note_marks()
        self.held.update(pin.name for pin in store.pins if pin.name)
        self.engine = engine = Engine(store, self._options, self.ranks.new_run())
        self.early = early = None
        if self._overlap:
            early = EarlyUpdates(engine, self.groups, self._marks, self._transfer)
            self.early = early
        # A state that is dropped without `close` must not keep threads, memory and the lock.
        self._abandoned = weakref.finalize(self, _abandon, engine, early)
        self._abandoned.atexit = False
        interpreter_end.at_end(self, OptimizerState._at_end)

    # The engine.

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return self.engine is None

    def running(self) -> Engine:
        """The engine. Raises UsageError when it is closed."""
        if self.engine is None:
            raise UsageError("the optimizer is closed; continue with resume")
        return self.engine

    def settled(self, *, forget: bool = False) -> Engine:
        """The engine, when it does not work on the next step. Raises its failure."""
        engine = self.running()
        if self.early is not None:
            if forget:
                self.early.forget()
            else:
                self.early.stop()
        engine.raise_failure()
        return engine

    # What changes.

    def step(self) -> None:
        """Update the parameters that have a gradient; nothing without any. See Engine.step.

        A rank without any makes a generation too if another rank has one: all have the same steps.
        """
        parameters = self.parameters()
        engine, early, values = self.running(), self.early, self.groups

        def check() -> None:
            nonlocal values
            values = kept_values(self.groups)
            check_gradients(engine.layout, parameters)

        if not self._agree(check, any(local_gradient(one) is not None for one in parameters)):
            return
        model = TrainerModel(parameters, self._marks, self._transfer)
        if early is None:
            engine.step(model, values, self._note_marks)
            return
        done = early.finish(values)

        def finish() -> None:
            early.install(done)
            self._note_marks()
            early.next(self._marks, done)

        engine.step(model, values, finish, early=done, then=early.order)

    def _agree(self, check: Callable[[], None], due: bool) -> bool:
        """Call `check`; return whether any rank is `due`.

        In a job that is when the last step and all pins are durable in all ranks. Raises RankError
        when another rank has failed, or is in another step.
        """
        if not self.ranks.sharded:
            if due:
                check()
            return due
        engine = self.running()

        def here() -> tuple[int, bool]:
            check()
            engine.wait()
            return engine.updates, due

        every = self.ranks.gather(self.ranks.each(here))
        steps = sorted(updates for updates, _ in every)
        if steps[0] != steps[-1]:
            raise RankError(f"the ranks are in different steps, {steps[0]} to {steps[-1]}")
        engine.store.agree()
        return any(wanted for _, wanted in every)

    def pin(self, pin: Pin, extra: bytes = b"") -> None:
        """Pin the state after the last step, with the groups as they are now. See Engine.pin.

        Raises UsageError when all pins are held.
        """
        engine = self.settled()
        if len(self.held) >= (most := engine.layout.pins):
            raise UsageError(f"all pins={most} belong to checkpoints of a Checkpointer")
        engine.pin(pin, extra, kept_values(self.groups))
        if pin.name:
            self.held.add(pin.name)

    def replace(self, source: StateSource, updates: int) -> None:
        """Make the next generation of `source`, and fill the parameters; durable on return."""
        self.restored = None  # another state is here
        engine = self.settled(forget=True)
        self._agree(lambda: None, True)
        engine.run = self.ranks.new_run()  # other ranks may have as many steps of the state before
        layout, parameters = engine.layout, self.parameters()

        def fill(buffer: ChunkBuffer) -> bool:
            tensors = buffer.tensors()
            for piece in layout.pieces(buffer.chunk):
                into = [place(piece, tensor) for tensor in tensors]
                source.read(piece.parameter, piece.begin, into)
                model = value_of(parameters[piece.parameter], piece)
                model.copy_(into[0])  # the master weights
                buffer.parameter(piece).copy_(model)
            return True

        engine.write_generation(
            fill, kept_values(self.groups), source.counts, updates, self._note_marks
        )
        self.ranks.each(engine.wait)
        if self.ranks.sharded:
            engine.store.agree()
        if self.early is not None:
            self.early.next(self._marks, ())

    # The parameters.

    def parameters(self) -> list[torch.Tensor]:
        """All parameters, in order."""
        return [parameter for group in self.groups for parameter in group["params"]]

    @property
    def untouched(self) -> bool:
        """Whether nothing was written to the parameters since the last step or load."""
        return self._marks == marks_of(self.parameters())

    def _note_marks(self) -> None:
        """Remember what tells later that the trainer has written to a parameter."""
        self._marks = marks_of(self.parameters())

    # The end.

    def close(self) -> None:
        """See AdamW.close."""
        engine, self.engine = self.engine, None
        if engine is not None:
            self._abandoned.detach()
            if self.early is not None:
                self.early.close()
            engine.close()

    def _at_end(self) -> None:
        """The interpreter ends: finish, or fail unless the trainer knows already."""
        if self.engine is not None and self.engine.reported:
            _abandon(self.engine, self.early)
        else:
            self.close()


def _abandon(engine: Engine, early: EarlyUpdates | None) -> None:
    if early is not None:
        early.close()
    engine.abandon()
