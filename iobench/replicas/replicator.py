"""Replicator: keeps the last snapshot of every rank in the memory of nodes."""

from __future__ import annotations

import queue
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from iobench import linux
from iobench.checkpoint.ranked.messages import Order, Part
from iobench.checkpoint.save import Save
from iobench.errors import IobenchError, RankError, ReplicaError, UsageError
from iobench.ranks.control import Control
from iobench.replicas.fetch import Fetched, Fetcher
from iobench.replicas.node import NodeAgents
from iobench.replicas.partner import Partner
from iobench.replicas.protocol import MemoryCopy, RecoveryPlan, SaveHeader, Version
from iobench.writers.image import Bytes, FileImage

__all__ = ["Offer", "Replicated", "Replicator"]

_ROUND_S = 24 * 3600.0  # a lost rank is known long before
_CLOSE_S = 300.0
_NICE = 10
_REMEMBERED = 1000


@dataclass(frozen=True, kw_only=True)
class Replicated:
    """The outcome of one offer on all ranks. `reason` says why there is no replica."""

    step: int
    outcome: Literal["complete", "skipped", "failed"]
    reason: str = ""
    copy_s: float = 0.0
    push_s: float = 0.0
    size_bytes: int = 0
    damaged_pieces: int = 0


class Offer:
    """A snapshot that is being replicated. `wait` returns when its memory may change."""

    def __init__(self, version: Version, image: FileImage | None, header: bytes, failure: str):
        self.version, self.image, self.header, self.failure = version, image, header, failure
        self._copied = threading.Event()
        if image is None:
            self._copied.set()

    def wait(self) -> None:
        """Wait until the agent of this node has its copy, or until that has failed."""
        self._copied.wait()

    def release(self) -> None:
        """The memory is not needed any more."""
        self.image = None
        self._copied.set()


class Offering:
    """Makes the offer of one save, see `Replicator.offering`."""

    def __init__(self, replicator: Replicator, version: Version, created_s: float) -> None:
        self._replicator, self._version, self._created_s = replicator, version, created_s
        self.table: str | None = None
        """In rank 0: the part of the index that has the tensors of all ranks, as JSON."""
        self._offer: Offer | None = None
        self._failure = ""

    def make(self, image: FileImage, part: Part) -> None:
        """Offer the bytes of a part, which are a snapshot: they do not change in this block."""
        try:
            header = SaveHeader(part=part, created_s=self._created_s, table=self.table).to_bytes()
        except Exception as error:  # noqa: BLE001 -- told as the replica's; the save goes on
            self._failure = f"{type(error).__name__}: {error}"
            return
        self._offer = self._replicator.offer(self._version, image, header)

    def end(self, error: BaseException | None) -> None:
        """Wait until the memory may change. Without an offer, tell the others why."""
        if self._offer is not None:
            self._offer.wait()
            return
        if error is not None:
            self._failure = f"{type(error).__name__}: {error}"
        self._replicator.offer(self._version, None, failure=self._failure)


class Replicator:
    """Replicates snapshots in the background, and finds them again after a restart.

    The constructor is a call of all ranks: it starts the agents and measures the network. Each
    snapshot is copied into the agent of its own node; then its memory is free again. The agents
    send it on at their pace. While they do, further offers are skipped, so a slow network makes
    replicas rarer and never delays training. After each transfer the ranks agree whether all of
    them have the version; only then it replaces the one before.
    """

    def __init__(self, partner: Partner, control: Control, location: str) -> None:
        self._control = control.sub("replicas")
        self._rounds = control.sub("replicas/rounds")
        self._agents = NodeAgents(partner, self._control, location)
        self._agents.join()
        self.rate_bytes_per_s = self._pace()
        """What a node sends at most; None with one node, which keeps only its own copies."""
        self.replicas: deque[Replicated] = deque(maxlen=_REMEMBERED)
        """Outcomes of the last 1,000 offers, oldest first."""
        self._offers: queue.SimpleQueue[Offer | None] = queue.SimpleQueue()
        self._pending = 0
        self._lock = threading.Lock()
        self._resumed = self._closing = False
        self._untold: list[str] = []
        self._failure: str | None = None
        if self._agents.first and not self._agents.targets:
            self._untold.append(
                "all ranks are on one node: replicas survive a crash of the trainer, but not the "
                "loss of the node"
            )
        self._thread: threading.Thread | None = None

    def _pace(self) -> float | None:
        rate = error = None
        if self._agents.first:
            try:
                rate = self._agents.set_pace()
            except ReplicaError as failure:
                error = failure
        rates = self._control.all_gather("measure network", rate, deadline_s=_CLOSE_S, error=error)
        return min((one for one in rates if one is not None), default=None)

    def offer(
        self, version: Version, image: FileImage | None, header: bytes = b"", *, failure: str = ""
    ) -> Offer:
        """Replicate the snapshot in `image`; returns at once.

        `header` is what a load needs to read the bytes. All ranks offer the same versions in the
        same order: one without a snapshot offers None, with the `failure` that is the reason. The
        memory must not change before `Offer.wait` returns.
        """
        with self._lock:
            free = self._pending == 0 and self._failure is None
            self._pending += 1
            offer = Offer(version, image if free else None, header, failure)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="iobench-replicator", daemon=True
                )
                self._thread.start()
        self._offers.put(offer)
        return offer

    @contextmanager
    def offering(self, order: Order, save: Save) -> Iterator[Offering]:
        """Make exactly one offer of a save: in the body when the bytes are known, or at its end.

        It ends when the memory may change again.
        """
        version = Version(order.serial, order.step, order.attempt)
        offering = Offering(self, version, save.created_s)
        try:
            yield offering
        except BaseException as error:
            offering.end(error)
            raise
        offering.end(None)

    def warn(self) -> None:
        """Warn of replicas that were not made since the last call (RuntimeWarning)."""
        with self._lock:
            untold, self._untold = self._untold, []
        for text in dict.fromkeys(untold):
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def copies(self) -> list[MemoryCopy]:
        """Return what the agents of all nodes hold. A call of all ranks."""
        return self._agents.held()

    def fetcher(self, plan: RecoveryPlan) -> Fetcher:
        """Return a reader of the versions in memory. The caller closes it."""
        return self._agents.fetcher(plan)

    def fetch(self, plan: RecoveryPlan, rank: int, start: int, memory: Bytes) -> Fetched:
        """Fill `memory` with the bytes that `rank` saved, from `start` on; see `Fetcher.fetch`."""
        fetcher = self.fetcher(plan)
        try:
            return fetcher.fetch(rank, start, memory)
        finally:
            fetcher.close()

    def resumed(self, version: Version | None) -> None:
        """Say from which version training continues; None: from the beginning.

        Newer versions in memory are dropped. A call of all ranks, after all of them have loaded.
        """
        self._resumed = True
        self._resume(self._control, version)

    def _resume(self, control: Control, version: Version | None) -> None:
        address = error = None
        control.barrier("loaded", deadline_s=_ROUND_S)
        if self._agents.first:
            try:
                address = self._agents.resume(version)
            except (IobenchError, OSError) as failure:
                error = failure
        found = control.all_gather(
            "resume from replicas", address, deadline_s=_CLOSE_S, error=error
        )
        self._agents.learn(found)  # an agent that has ended meanwhile was started anew

    def forget(self, step: int) -> None:
        """Drop the replicas of `step` on this node."""
        self._agents.forget(step)

    @property
    def busy(self) -> bool:
        """Whether an offer is neither complete nor skipped nor failed."""
        with self._lock:
            return self._pending > 0

    def wait(self) -> None:
        """Wait until every offer is complete, skipped or failed."""
        while True:
            with self._lock:
                if not self._pending or self._thread is None or not self._thread.is_alive():
                    return
            time.sleep(0.005)

    def close(self, *, finished: bool) -> None:
        """End the connections.

        With `finished` all ranks have ended well, and the agents end with their memory: a call of
        all ranks. Without it the agents stay for a restart.
        """
        if self._closing:
            return
        self._closing = True
        try:
            if finished:
                self._control.barrier("close replicas", deadline_s=_CLOSE_S)
                self._agents.finish()
        except (RankError, ReplicaError):
            finished = False  # another rank has ended badly: a restart may need the memory
        self._offers.put(None)
        if self._thread is not None:
            self._thread.join(_CLOSE_S if finished else 1.0)
        self._agents.close()

    def _work(self) -> None:
        try:
            linux.yield_to_others(_NICE)
        except OSError as error:
            self._untold.append(f"replicas are made at the trainer's own priority ({error})")
        while (offer := self._offers.get()) is not None:
            try:
                self._round(offer)
            except Exception as error:  # noqa: BLE001 -- told by `warn`, in the trainer's thread
                self._fail(str(error), offer)
            finally:
                offer.release()
                with self._lock:
                    self._pending -= 1

    def _fail(self, reason: str, offer: Offer) -> None:
        """Make no more replicas: the ranks do not agree any more."""
        step = offer.version.step
        with self._lock:
            first, self._failure = self._failure is None, self._failure or reason
            if first and not self._closing:
                self._untold.append(f"no replicas are made from step {step} on: {reason}")
            self.replicas.append(Replicated(step=step, outcome="failed", reason=self._failure))

    def _round(self, offer: Offer) -> None:
        """Replicate one offer and settle it with all ranks. Raises RankError."""
        if self._failure is not None:
            raise ReplicaError(self._failure)
        if not self._resumed:  # the job begins anew: copies of earlier starts are of no use
            self._resumed = True
            self._resume(self._rounds, None)
        version = offer.version
        found, address = self._replicate(offer), None
        if self._agents.first and not self._closing:
            try:
                address = self._agents.running(doubtful=found.outcome == "failed")
            except (IobenchError, OSError) as error:
                if found.outcome == "complete":
                    found = Replicated(step=version.step, outcome="failed", reason=str(error))
        told = self._rounds.all_gather(
            f"replicate step {version.step}",
            [list(version), found.outcome, found.reason, address],
            deadline_s=_ROUND_S,
        )
        self._agents.learn([one[3] for one in told])
        if any(one[0] != list(version) for one in told):
            raise UsageError(f"the ranks replicate different saves: {[one[0] for one in told]}")
        self._settle(version, found, told)

    def _settle(self, version: Version, found: Replicated, told: list[list[str]]) -> None:
        complete = all(one[1] == "complete" for one in told)
        if self._agents.first:
            try:
                self._agents.settle(version, kept=complete)
            except ReplicaError as error:
                self._tell(f"step {version.step}: {error}")
        others = [(rank, one) for rank, one in enumerate(told) if one[1] == "failed"]
        if others:
            rank, (_, _, reason, _) = others[0]
            reason = f"rank {rank}: {reason}"
            found = Replicated(step=version.step, outcome="failed", reason=reason)
            self._tell(f"step {version.step} has no replica: {reason}")
        elif not complete:
            found = Replicated(
                step=version.step, outcome="skipped", reason="the last replica is still being sent"
            )
        if found.damaged_pieces:
            self._tell(
                f"step {version.step}: {found.damaged_pieces} pieces arrived damaged and were sent "
                "again"
            )
        self.replicas.append(found)

    def _tell(self, text: str) -> None:
        with self._lock:
            if not self._closing:
                self._untold.append(text)

    def _replicate(self, offer: Offer) -> Replicated:
        step, image = offer.version.step, offer.image
        if image is None:
            outcome: Literal["failed", "skipped"] = "failed" if offer.failure else "skipped"
            return Replicated(step=step, outcome=outcome, reason=offer.failure)
        size, began_s = image.size_bytes, time.monotonic()
        try:
            self._agents.copy(offer.version, image, offer.header)
            copied_s = time.monotonic()
            offer.release()
            damaged = self._agents.push(offer.version)
        except (ReplicaError, OSError) as error:
            return Replicated(step=step, outcome="failed", reason=str(error))
        return Replicated(
            step=step,
            outcome="complete",
            copy_s=copied_s - began_s,
            push_s=time.monotonic() - copied_s,
            size_bytes=size,
            damaged_pieces=damaged,
        )
