"""Engine: steps, commits and pins on one state directory, with threads of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from iobench.errors import OptionError, UsageError
from iobench.offload.model import ChunkPace, StepModel
from iobench.offload.record import GenerationRecord, Pin, check_groups
from iobench.offload.store import Commit, GenerationStore
from iobench.offload.stream import ChunkStream, Update
from iobench.offload.update import ChunkUpdate
from iobench.units import parse_size

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Engine", "EngineOptions", "EngineProgress"]

Groups = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How much memory the engine may use, and how it reads and writes."""

    memory_bytes: int
    iodepth: int
    block_size: int
    max_lag: int

    @classmethod
    def parse(
        cls, memory: str | int, iodepth: int, block_size: str | int, max_lag: int
    ) -> EngineOptions:
        """Raises OptionError for values out of range."""
        size = parse_size(block_size, "block_size")
        if not size or size % 4096:
            raise OptionError(f"block_size={block_size}: a multiple of 4096 bytes")
        if iodepth < 1:
            raise OptionError(f"iodepth={iodepth}: at least 1")
        if max_lag < 0:
            raise OptionError(f"max_lag={max_lag}: 0 or more steps")
        return cls(
            memory_bytes=parse_size(memory, "memory"),
            iodepth=iodepth,
            block_size=size,
            max_lag=max_lag,
        )

    @property
    def speed(self) -> dict[str, int]:
        """The arguments of reads and writes."""
        return {"iodepth": self.iodepth, "block_size": self.block_size}


@dataclass(frozen=True, kw_only=True)
class EngineProgress:
    """What is on storage, and what the trainer has."""

    updates: int
    """Steps of the trainer."""
    durable_updates: int
    pinned: tuple[int, ...]
    """Steps of the durable pins."""
    held: int = 0
    """How many of them are held."""


class Engine:
    """What an optimizer needs of its state. It owns `store`, and closes it.

    Every method raises TransferError after a failure of storage.
    """

    def __init__(self, store: GenerationStore, options: EngineOptions, run: str) -> None:
        """`run`: see GenerationRecord."""
        self.run = run
        self.store, self.options, self.layout = store, options, store.layout
        try:
            layout, base = store.layout, store.base
            buffers = min(layout.buffers(options.memory_bytes), max(2, layout.chunks))
            if buffers < 2:
                raise OptionError(f"memory={options.memory_bytes}: too small for two chunks")
            none = np.zeros(len(layout.parameters), dtype=np.uint64)
            self._counts = none if base is None else base.counts
            self._updates = 0 if base is None else base.updates
            self._generation = store.last_generation
            self._began_s = 0.0
            self._scratch = torch.empty(layout.chunk_elements, dtype=torch.float32, device="cpu")
            self._stream = ChunkStream(store, buffers=buffers, **options.speed)
        except BaseException:
            store.close()
            raise

    @property
    def reported(self) -> bool:
        """Whether it has failed, and a method has raised that in the trainer's thread."""
        return self._stream.reported

    def early(self, model: StepModel, groups: Groups, order: Sequence[int]) -> None:
        """Begin the next step: update chunks as long as `model` is ready for the next one.

        They come in the order that the last `step` was given, without one in `order`. Nothing of it
        counts before `step`. No other method may be called meanwhile.
        """
        self._began_s = self._began_s or time.monotonic()
        with torch.no_grad():
            self._stream.run_early(
                self._update(model, groups),
                model,
                order,
                generation=self._generation + 1,
                updates=self._updates + 1,
            )

    def step(
        self,
        model: StepModel,
        groups: Groups,
        finish: Callable[[], None],
        *,
        early: Collection[int] = (),
        then: Sequence[int] | None = None,
    ) -> None:
        """Update the parameters that have a gradient; return when they are new and at most
        `max_lag` steps are not durable.

        What `early` has updated counts for the chunks in `early` only: `model` gets no values of
        them, and those of all others. `finish` is called when they are new. The next step will
        have its chunks in the order `then`."""
        due = [model.has_gradient(index) for index in range(len(self._counts))]
        self.write_generation(
            self._update(model, groups),
            groups,
            self._counts + np.array(due, dtype=np.uint64),
            self._updates + 1,
            finish,
            pace=model,
            early=early,
            then=then,
        )

    def _update(self, model: StepModel, groups: Groups) -> ChunkUpdate:
        counts = [int(count) for count in self._counts]
        return ChunkUpdate(self.layout, model, groups, counts, self._scratch)

    def write_generation(
        self,
        update: Update,
        groups: Groups,
        counts: npt.NDArray[np.uint64],
        updates: int,
        finish: Callable[[], None],
        *,
        pace: ChunkPace | None = None,
        early: Collection[int] = (),
        then: Sequence[int] | None = None,
    ) -> None:
        """Make the next generation by `update`, call `finish`, and wait as `max_lag` asks."""
        check_groups(self.layout, groups)
        generation, began_s = self._generation + 1, self._began_s or time.monotonic()
        self._began_s = 0.0
        with torch.no_grad():
            self._stream.run(
                update, generation=generation, updates=updates, pace=pace, early=early, then=then
            )
        # Ctrl-C before the commit is in the queue: the next step raises that this one was
        # interrupted. After it: the parameters and the counters are those of this step already.
        finish()
        self._generation, self._counts, self._updates = generation, counts, updates
        self._stream.commit(
            Commit(
                run=self.run,
                generation=generation,
                updates=updates,
                counts=counts,
                groups=groups,
                began_s=began_s,
            )
        )
        reached = generation - self.options.max_lag
        self._stream.wait_for(lambda: self._durable_generation() >= reached)

    def _durable_generation(self) -> int:
        newest = self.store.newest
        return newest.generation if newest else 0

    def pin(self, pin: Pin, extra: bytes | None, groups: Groups) -> None:
        """Pin the last generation with these values of the groups; waits for nothing."""
        if not self._generation:
            raise UsageError(f"step {pin.step}: nothing to pin before the first call of step()")
        check_groups(self.layout, groups)
        self._stream.pin(pin, extra, groups)

    def unpin(self, names: Collection[str]) -> None:
        """Release the held pins with these names; waits for nothing."""
        self._stream.unpin(names)

    def wait_for_pin(self, name: str) -> GenerationRecord | None:
        """Wait until the held pin is durable, and return its record. For any thread.

        None when the engine has ended before, by a failure or by `close`.
        """
        return self._stream.wait_for_pin(name)

    def wait(self) -> None:
        """Wait until all steps and pins are durable."""
        self._stream.wait()

    def progress(self) -> EngineProgress:
        """What is durable by now."""
        self._stream.raise_failure()
        newest = self.store.newest
        return EngineProgress(
            updates=self._updates,
            durable_updates=newest.updates if newest else 0,
            pinned=tuple(pin.step for pin in self.store.pins),
            held=sum(bool(pin.name) for pin in self.store.pins),
        )

    def close(self) -> None:
        """Wait until all is durable, and release everything, also when that fails."""
        try:
            self._stream.wait()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Release everything without an exception for what did not become durable.

        The garbage collector may call it in a thread of the stream.
        """
        if self._stream.is_own_thread():
            threading.Thread(target=self._release, name="iobench-offload-end").start()
        else:
            self._release()

    def _release(self) -> None:
        try:
            self._stream.close()
        finally:
            self.store.close()
