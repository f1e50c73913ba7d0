"""Replicator: the last snapshot of every rank, on two nodes, and the plan of what is restored."""

from __future__ import annotations

import queue
import threading
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from iobench import linux
from iobench.checkpoint.piece_reader import HeldFiles
from iobench.checkpoint.place import PartOffer
from iobench.checkpoint.ranked.messages import Order, Part, shown
from iobench.checkpoint.ranked.plan import data_file
from iobench.checkpoint.rate_limit import RateLimit
from iobench.checkpoint.save import Save
from iobench.errors import IobenchError, RankError, ReplicaError
from iobench.ranks.control import Control, some_ranks
from iobench.ranks.exchange import HeldBytes, Reader, Transport
from iobench.ranks.restore_plan import Range
from iobench.remote.snapshot_memory import MemoryReader
from iobench.replicas.directory import (
    ReplicaDirectory,
    SaveHeader,
    Version,
    job_of,
    remove_unused,
)
from iobench.replicas.partner import Partner
from iobench.units import MIB
from iobench.writers.image import Bytes, FileImage

_ROUND_S = 24 * 3600.0  # a lost rank is known long before
_CLOSE_S = 300.0
_NICE = 10
_REMEMBERED = 1000


class MemoryCopy(NamedTuple):
    """The complete bytes of `rank`, one of `ranks` that saved, in the memory of `node`."""

    version: Version
    rank: int
    ranks: int
    node: int


@dataclass(frozen=True, kw_only=True)
class RecoveryPlan:
    """Where the bytes of every rank of one version are.

    `ranks` is the number of ranks that saved; None when only storage knows it. `holders` has the
    nodes with a rank's bytes. `passed_over` has newer versions that are not complete, with the
    reasons.
    """

    version: Version
    ranks: int | None
    stored: bool
    holders: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    passed_over: tuple[tuple[Version, str], ...] = ()


def recovery_plan(
    memory: Iterable[MemoryCopy], stored: Collection[Version] = ()
) -> RecoveryPlan | None:
    """Return the plan for the newest version of which every rank's bytes can be had.

    A rank's bytes can be had from memory, and those of a version that is `stored` from storage.
    None when no version is complete.
    """
    found: dict[Version, list[MemoryCopy]] = {version: [] for version in stored}
    for copy in memory:
        found.setdefault(copy.version, []).append(copy)
    passed: list[tuple[Version, str]] = []
    for version, copies in sorted(found.items(), reverse=True):
        holders: dict[int, set[int]] = defaultdict(set)
        for copy in copies:
            holders[copy.rank].add(copy.node)
        ranks = max((copy.ranks for copy in copies), default=None)
        lost = [rank for rank in range(ranks or 0) if rank not in holders]
        if version in stored or not lost:
            return RecoveryPlan(
                version=version,
                ranks=ranks,
                stored=version in stored,
                holders={rank: tuple(sorted(nodes)) for rank, nodes in holders.items()},
                passed_over=tuple(passed),
            )
        passed.append((version, f"no source has the bytes of {some_ranks(lost)}"))
    return None


@dataclass(frozen=True, kw_only=True)
class Replicated:
    """The outcome of one offer on all ranks. `reason` says why there is no replica."""

    step: int
    outcome: Literal["complete", "skipped", "failed"]
    reason: str = ""
    copy_s: float = 0.0
    push_s: float = 0.0
    size_bytes: int = 0


class Offer:
    """The snapshot of one save, which is replicated; see `Replicator.offering`."""

    def __init__(self, version: Version, created_s: float, put: Callable[[Offer], None]) -> None:
        self.version, self._created_s, self._put = version, created_s, put
        self.image: FileImage | None = None
        self.header, self.failure = b"", ""
        self.free = threading.Event()
        """Set when the memory may change."""

    def make(self, image: FileImage, part: Part, table: str | None) -> None:
        """Offer the bytes of a part: they do not change before the end. See `PartOffer`."""
        try:
            header = SaveHeader(part=part, created_s=self._created_s, table=table).to_bytes()
        except Exception as error:  # noqa: BLE001 -- told as the replica's; the save goes on
            self.failure = shown(error)
            return
        self.image, self.header = image, header
        self._put(self)

    def release(self) -> None:
        """The memory is not needed any more."""
        self.image = None
        self.free.set()


class Replicator:
    """Replicates snapshots in the background, and finds them again after a restart.

    The constructor is a call of all ranks: it connects them and measures the network. Each snapshot
    is copied to tmpfs; then its memory is free again. From there a thread sends it to a rank of the
    partner's node, no faster than its pace. While it does, further offers are skipped, so a slow
    network makes replicas rarer and never delays training. After each transfer the ranks agree
    whether all of them have the version; only then it replaces the one before.
    """

    def __init__(self, partner: Partner, control: Control, location: str) -> None:
        self._partner, self._location = partner, location
        self._control = control.sub("replicas")
        self._rounds = control.sub("replicas/rounds", deadline_s=_ROUND_S)
        self._directory = ReplicaDirectory.of(job_of(location))
        self._control.together("find replicas", self._take)
        try:
            self._sender = Sender(partner, self._rounds, self._directory)
        except BaseException:
            self._directory.release()
            raise
        self._nodes = control.nodes
        self.replicas: deque[Replicated] = deque(maxlen=_REMEMBERED)
        """Outcomes of the last 1,000 offers, oldest first."""
        self._offers: queue.SimpleQueue[Offer | None] = queue.SimpleQueue()
        self._pending = 0
        self._lock = threading.Lock()
        self._settled: Version | None = None
        """The last version that all ranks have: the other ones are not needed."""
        self._resumed = self._closing = False
        self._untold: list[str] = []
        if self._first and not self._sender.receivers:
            self._untold.append(
                "all ranks are on one node: replicas survive a crash of the trainer, but not the "
                "loss of the node"
            )
        self._thread = threading.Thread(target=self._work, name="iobench-replicator", daemon=True)
        self._thread.start()

    @property
    def _first(self) -> bool:
        """Whether this rank makes and removes the files that its node does not need."""
        return self._control.world.local_rank == 0

    def _take(self) -> None:
        if self._first:
            remove_unused(self._directory, self._location)
            self._directory.take(location=self._location, keep_s=self._partner.keep_s)

    @contextmanager
    def offering(self, order: Order, save: Save) -> Iterator[PartOffer]:
        """Replicate the snapshot of a save, which the body provides. All ranks do, in one order.

        It ends when the memory may change again. A rank without a snapshot tells the others why.
        """
        version = Version(order.serial, order.step, order.attempt)
        offer = Offer(version, save.created_s, self._put)
        try:
            yield offer.make
        except BaseException as error:
            offer.failure = shown(error)
            raise
        finally:
            if offer.header:
                offer.free.wait()
            else:
                self._put(offer)

    def _put(self, offer: Offer) -> None:
        with self._lock:
            if self._pending:
                offer.release()
            self._pending += 1
        self._offers.put(offer)

    def warn(self) -> None:
        """Warn of replicas that were not made since the last call (RuntimeWarning)."""
        with self._lock:
            untold, self._untold = self._untold, []
        for text in dict.fromkeys(untold):
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def copies(self) -> list[MemoryCopy]:
        """Return what all nodes have in memory. A call of all ranks."""
        own = self._directory.listed() if self._first else []
        every = self._control.all_gather("list replicas", own)
        return [
            MemoryCopy(Version(*version), rank, ranks, node)
            for node, listed in zip(self._nodes, every, strict=True)
            for version, rank, ranks in listed
        ]

    def held(self, plan: RecoveryPlan) -> tuple[HeldFiles, dict[MemoryCopy, str]]:
        """Return the bytes of `plan` in memory, and copies that are damaged, with the reasons.

        A call of all ranks. Each compares a part of the files of its node with their checksums.
        """
        world, ranks = self._control.world, plan.ranks or 0
        here = [saved for saved, nodes in plan.holders.items() if world.node in nodes]
        images, damaged = dict[str, FileImage](), list[tuple[int, str]]()
        for number, saved in enumerate(here):
            try:
                image = self._directory.image(plan.version, saved)
                if number % world.local_size == world.local_rank:
                    header = self._directory.header(plan.version, saved, ranks)
                    header.check(image)
                images[image.path] = image
            except IobenchError as error:
                damaged.append((saved, str(error)))
        every = self._control.all_gather("check replicas", damaged)
        holders = {
            data_file(saved): [rank for rank, node in enumerate(self._nodes) if node in nodes]
            for saved, nodes in plan.holders.items()
        }
        wrong = {
            MemoryCopy(plan.version, saved, ranks, node): reason
            for node, found in zip(self._nodes, every, strict=True)
            for saved, reason in found
        }
        return HeldFiles(images, holders), wrong

    def headers(self, plan: RecoveryPlan) -> list[SaveHeader]:
        """Return the headers of all ranks that saved, in rank 0. A call of all ranks."""
        world, ranks = self._control.world, plan.ranks or 0

        def own() -> dict[int, str]:
            return {
                saved: self._directory.header(plan.version, saved, ranks).to_bytes().hex()
                for saved, nodes in plan.holders.items()
                if nodes[0] == world.node and saved % world.local_size == world.local_rank
            }

        _, every = self._control.together("headers of replicas", own, kind="gather")
        found = {int(saved): text for one in every for saved, text in one.items()}
        return [
            SaveHeader.parse(bytes.fromhex(found[saved]), f"the replica of rank {saved}")
            for saved in sorted(found)
        ]

    def resumed(self, version: Version | None) -> None:
        """Say from which version training continues; None: from the beginning.

        Other versions in memory are removed. A call of all ranks, after all of them have loaded.
        """
        self._resume(self._control, version)

    def _resume(self, control: Control, version: Version | None) -> None:
        control.barrier("loaded")
        self._settled, self._resumed = version, True
        self._settle(control, "resume from replicas")

    def close(self, *, finished: bool) -> None:
        """End the connections.

        With `finished` all ranks have ended well, and the files are removed: a call of all ranks.
        Without it they stay for a restart.
        """
        if self._closing:
            return
        self._closing = True
        try:
            if finished:
                self._control.barrier("close replicas")
        except RankError:
            finished = False  # another rank has ended badly: a restart may need the files
        self._offers.put(None)
        self._thread.join(_CLOSE_S if finished else 1.0)
        self._sender.close()
        if self._first and finished:
            self._directory.remove()
        elif self._first:
            self._directory.release()

    def _work(self) -> None:
        try:
            linux.yield_to_others(_NICE)
        except OSError as error:
            self._untold.append(f"replicas are made at the trainer's own priority ({error})")
        while (offer := self._offers.get()) is not None:
            try:
                found = self._round(offer)
            except Exception as error:  # noqa: BLE001 -- told by `warn`, in the trainer's thread
                step = offer.version.step
                found = Replicated(step=step, outcome="failed", reason=str(error))
                with self._lock:
                    if not self._closing:
                        self._untold.append(f"step {step} has no replica: {error}")
            finally:
                offer.release()
                with self._lock:
                    self._pending -= 1
            self.replicas.append(found)

    def _round(self, offer: Offer) -> Replicated:
        """Replicate one offer in all ranks, or in none."""
        if not self._resumed:  # the job begins anew: copies of earlier starts are of no use
            self._resume(self._rounds, None)
        try:
            found = self._replicated(offer)
            if found.outcome == "complete":
                self._settled = offer.version
        finally:
            if not self._rounds.broken:
                self._settle(self._rounds, f"settle step {offer.version.step}")
        return found

    def _replicated(self, offer: Offer) -> Replicated:
        """Copy a snapshot to tmpfs of this node, and send it to the node of the partner."""
        step, began_s = offer.version.step, time.monotonic()
        own, sizes = self._rounds.together(f"replicate step {step}", lambda: self._copied(offer))
        if None in sizes:
            reason = "the last replica is still being sent"
            return Replicated(step=step, outcome="skipped", reason=reason)
        assert own is not None
        copied_s = time.monotonic()
        if self._sender.receivers:
            self._sender.send(offer.version, offer.header, sizes)
        return Replicated(
            step=step,
            outcome="complete",
            copy_s=copied_s - began_s,
            push_s=time.monotonic() - copied_s,
            size_bytes=own[0],
        )

    def _copied(self, offer: Offer) -> tuple[int, int] | None:
        """Copy a snapshot to tmpfs. Return its bytes and those of the header; None without one."""
        version, image, world = offer.version, offer.image, self._control.world
        if offer.failure:
            raise ReplicaError(offer.failure)
        if image is None:
            return None
        try:
            budget = self._partner.budget_bytes
            self._directory.new_file(version, world.rank, image.size_bytes, budget)
            self._directory.copy(version, world.rank, image)
            self._directory.complete(version, world.rank, world.size, offer.header)
        finally:
            offer.release()
        return image.size_bytes, len(offer.header)

    def _settle(self, control: Control, phase: str) -> None:
        """Remove all versions but the last one that all ranks have. All ranks wait for it."""

        def remove() -> None:
            if self._first:
                self._directory.keep(self._settled)

        control.together(phase, remove)


_SMALLEST_PROBE, _LARGEST_PROBE = 4 * MIB, 64 * MIB
_PROBE_S = 0.05


class Sender:
    """The connections between partners. The constructor and `send` are calls of all ranks.

    A rank sends no faster than its share of the rate of its node, which is given or measured.
    """

    def __init__(self, partner: Partner, control: Control, directory: ReplicaDirectory) -> None:
        self._partner, self._control, self._directory = partner, control, directory
        self._transport = Transport(control)
        self.receivers = partner.receivers(control.nodes)
        """The rank that keeps the copy of each rank; empty with one node."""
        self._limit = RateLimit(self._pace() if self.receivers else None)

    def _pace(self) -> float:
        """Return what this rank may send in a second."""
        world, given = self._control.world, self._partner.rate_bytes_per_s
        if given is not None:
            return given / world.local_size
        size = _SMALLEST_PROBE
        while True:
            began_s = time.monotonic()
            self._exchange(
                _image([_memory(size)]), {r: _image([_memory(size)]) for r in self._kept}
            )
            own_s = time.monotonic() - began_s
            slowest_s: float = max(self._control.all_gather("probe", own_s))
            if slowest_s >= _PROBE_S or size >= _LARGEST_PROBE:
                return self._partner.share * size / slowest_s
            size *= 4  # too short: most of it was the begin

    @property
    def _kept(self) -> list[int]:
        """The ranks of which this rank keeps a copy."""
        return [rank for rank, to in enumerate(self.receivers) if to == self._control.world.rank]

    def send(self, version: Version, header: bytes, sizes: Sequence[Sequence[int]]) -> None:
        """Send the bytes of this rank and their header. On return all ranks have all copies.

        `sizes` has the bytes of the file and of the header of each rank. An error is raised in all
        ranks: ReplicaError where memory is short, DataMismatchError for bytes that arrived damaged,
        RankError in the others.
        """
        directory, rank, step = self._directory, self._control.world.rank, version.step

        def room() -> tuple[FileImage, dict[int, tuple[FileImage, Bytes]]]:
            made, budget = dict[int, tuple[FileImage, Bytes]](), self._partner.budget_bytes
            for one in self._kept:
                size, header_size = sizes[one]
                made[one] = directory.new_file(version, one, size, budget), _memory(header_size)
            return directory.image(version, rank), made

        (own, kept), _ = self._control.together(f"memory for step {step}", room, lambda _: None)
        sent = self._limit.limited(_with(own, header))
        self._exchange(sent, {one: _with(*memory) for one, memory in kept.items()})

        def complete() -> None:
            for one, (image, described) in kept.items():
                text = described.tobytes()
                SaveHeader.parse(text, f"the replica of rank {one}").check(image)
                directory.complete(version, one, len(sizes), text)

        self._control.together(f"check of step {step}", complete)

    def _exchange(self, own: FileImage, incoming: Mapping[int, FileImage]) -> None:
        """Send `own`, and fill the memory of what comes from other ranks."""
        world = self._control.world
        held = HeldBytes({world.rank: own}, {rank: [rank] for rank in range(world.size)})
        wanted = [Range(rank, 0, image.size_bytes) for rank, image in incoming.items()]
        reader = Reader(self._transport, "all")
        reader.read(incoming, MemoryReader([], "the memory of the partner", None), wanted, held)

    def close(self) -> None:
        """End the connections."""
        self._transport.close()


def _memory(size_bytes: int) -> Bytes:
    return np.zeros(size_bytes, np.uint8)


def _with(image: FileImage, header: bytes | Bytes) -> FileImage:
    """Return `image` with its header behind it, for a transfer of both."""
    return _image([*(memory for _, memory in image.parts()), header])


def _image(memories: list[Any]) -> FileImage:
    return FileImage.of("replica", memories)
