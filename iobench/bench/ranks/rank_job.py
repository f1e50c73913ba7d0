"""RankJob: the job of one rank, which also counts, settles and evicts on its own machine."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from iobench.bench import fio
from iobench.bench.contenders.base import WriterContender
from iobench.bench.counters.nodes import NodeCounter, NodeCounts
from iobench.bench.data.slicing import Sliced
from iobench.bench.processes.job import CheckpointRef, Done, Job, JobSetup
from iobench.bench.targets.cold import EvictedFiles, evict
from iobench.bench.targets.entries import FilesBelow
from iobench.bench.targets.instruments import Instruments
from iobench.bench.targets.settle import Patience, settled
from iobench.checkpoint.staged import reraise
from iobench.environment import DeviceMonitor
from iobench.ranks.control import Control
from iobench.ranks.exchange import Transport
from iobench.ranks.restore_mode import Reader
from iobench.results.records import Operation, Stored
from iobench.writers.local.new_file import sync_directory
from iobench.writers.s3_store.target import is_s3

__all__ = ["Machine", "RankJob"]


@dataclass(frozen=True, kw_only=True)
class _Storage:
    """One target as this machine sees it."""

    directory: Path
    monitor: DeviceMonitor
    instruments: Instruments
    patience: Patience


class Machine:
    """The storage of a run on the machine of one rank.

    With `counts`, this rank is the one that counts and settles there; on rank 0's machine the run
    itself does that. `away` says that it is another machine than that of rank 0.
    """

    def __init__(self, scratch: Sequence[str], *, counts: bool, away: bool) -> None:
        self.counts, self.away = counts, away
        self._storages = [self._storage(Path(one)) for one in scratch if not is_s3(one)]

    @staticmethod
    def _storage(directory: Path) -> _Storage:
        monitor = DeviceMonitor(directory)
        instruments = Instruments.probe(directory, monitor)
        return _Storage(
            directory=directory, monitor=monitor, instruments=instruments, patience=Patience()
        )

    def under(self, location: str) -> _Storage | None:
        """Return the storage of a checkpoint; None for one in a bucket."""
        parents = Path(location).parents
        return next((one for one in self._storages if one.directory in parents), None)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Run a block, and return when earlier work of this machine has left the storage alone."""
        with ExitStack() as waits:
            if self.counts:
                for one in self._storages:
                    waits.enter_context(settled(one.directory, one.monitor, one.patience))
            yield


class RankJob(Job):
    """The job of one rank. Rank 0's has no `machine`: its run counts and settles itself."""

    def __init__(
        self, setup: JobSetup, machine: Machine | None = None, *, replica: bool = False
    ) -> None:
        super().__init__(setup)
        self._replica = replica
        self._transport: Transport | None = None
        self._machine = machine
        self._counter: NodeCounter | None = None
        self._counted: NodeCounts | None = None
        self._fio = ExitStack()
        self._measure: Callable[[], fio.FioSample] | None = None

    def prepare(
        self, shape: int, checkpoint: tuple[int, ...], sliced: Sliced | None = None
    ) -> None:
        with self._settled():
            super().prepare(shape, checkpoint, sliced)

    def scrub(self, shape: int, subset: float | None) -> None:
        with self._settled():
            super().scrub(shape, subset)

    def save(self, ref: CheckpointRef) -> Done:
        """Save every file, and sync the directories: another node cannot sync them from there."""
        done = super().save(ref)
        away = self._machine is not None and self._machine.away
        if not away or is_s3(ref.directory) or not done.transfer.files:
            return done
        for directory, _, _ in os.walk(self._own(ref.directory), topdown=False, onerror=reraise):
            sync_directory(directory)
        return replace(done, at_s=time.perf_counter())

    def join(self, control: Control) -> None:
        """Connect replicas with each other. All ranks call it."""
        if self._replica:
            self._transport = Transport(control)

    def leave(self) -> None:
        """Close the connections."""
        if self._transport is not None:
            self._transport.close()

    def restore(self, ref: CheckpointRef) -> Done:
        """Restore the subset that was given to `scrub`; replicas do it together."""
        if ref.restore_mode is None:
            return super().restore(ref)
        assert self._transport is not None  # `join` was called
        one, replay = self._reading(ref), self.sources[ref.shape]
        assert isinstance(one, WriterContender)  # others take no part
        reader = Reader(self._transport, ref.restore_mode)
        return self._done(one, replay, one.restore(replay, self._from(ref), reader))

    def count(self, ref: CheckpointRef) -> None:
        """Start the counters of this machine, unless another rank or the run counts there."""
        storage = self._machine and self._machine.counts and self._machine.under(ref.directory)
        if storage:
            self._counter = NodeCounter(
                storage.monitor,
                device_counts=storage.instruments.device_counts,
                flush_counts=storage.instruments.flush_counts,
            )

    def all_done(self) -> None:
        """Stop the counters: all ranks are done, also the others of this machine."""
        if self._counter is not None:
            self._counted, self._counter = self._counter.stop(), None

    def counted(self) -> NodeCounts | None:
        """Return what this machine counted during the last timed operation of all ranks."""
        counted, self._counted = self._counted, None
        return counted

    def digests(self, shape: int) -> str:
        """Return the digests of the tensors that were saved, for the rank that restores them."""
        return self.replays[shape].digests()

    def expect(self, shape: int, digests: str) -> None:
        """Compare the next restore with these digests of another rank."""
        self.sources[shape].expect(digests)

    def evict(self, ref: CheckpointRef) -> EvictedFiles:
        """Remove what this rank wrote, and what it restores, from its machine's page cache.

        Counts what stays of the files that it restores.
        """
        own, source = self._own(ref.directory), self._from(ref)
        if own != source and ref.sliced is None:  # all slices are below `source`
            evict(FilesBelow(own))
        return evict(FilesBelow(source))

    def inspect(self, ref: CheckpointRef) -> Stored | None:
        """Return what this machine's page cache holds of the files of this rank."""
        storage = self._machine and self._machine.under(ref.directory)
        if not storage:
            return None
        return storage.instruments.inspect(Path(self._own(ref.directory)), ())

    def fio_start(
        self, job: int, operation: Operation, directory: str, size_bytes: int, fallocate: bool
    ) -> None:
        """Start a fio job on this node, up to the begin of its clock. Raises FioError.

        Without a `directory`, another rank of the node does it.
        """
        if not directory:
            return
        os.makedirs(directory, exist_ok=True)
        with ExitStack() as stack:
            started = fio.started(
                fio.JOBS[job], operation, directory, size_bytes, fallocate=fallocate
            )
            self._measure = stack.enter_context(started)
            with self._settled():
                pass
            self._fio = stack.pop_all()

    def fio_measure(self) -> fio.FioSample | None:
        """Let the job go on, and return what it measured. Raises FioError."""
        if self._measure is None:
            return None
        with self._fio.pop_all():
            measure, self._measure = self._measure, None
            return measure()

    def fio_stop(self) -> None:
        """Stop the job, if there is one."""
        self._measure = None
        with contextlib.suppress(_StopError), self._fio.pop_all():
            raise _StopError

    def _settled(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._machine is None else self._machine.settled()


class _StopError(Exception):
    """Ends a fio job."""
