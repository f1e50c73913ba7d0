"""LocalTier: the directory of the checkpoints, which are copied from it to the remote tier.

Placing: rank 0 chooses by measured throughput where all ranks write each checkpoint.
"""

from __future__ import annotations

import secrets
import shutil
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from iobench.checkpoint.content import Content
from iobench.checkpoint.ledger import Ledger
from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.object_store import ObjectStore
from iobench.checkpoint.place import LocalPlace, PartTarget, Place
from iobench.checkpoint.ranked.messages import VoteError
from iobench.checkpoint.retention import Retention
from iobench.checkpoint.save import Copy, Save
from iobench.checkpoint.store import CheckpointStore, DirectoryStore, Staged
from iobench.errors import IobenchError, TransferError, transfer_errors
from iobench.ranks.control import ALONE, Control
from iobench.remote.drain import Drain
from iobench.remote.placement import (
    LOCAL,
    REMOTE,
    Placement,
    PlacementDecision,
    TierHistory,
    choose,
)
from iobench.remote.queue import Queued
from iobench.remote.remote import Remote, RemoteTier
from iobench.units import MIB, format_size
from iobench.writers.base import Writer
from iobench.writers.blocks import interpreter_end
from iobench.writers.image import Bytes, FileImage
from iobench.writers.local.new_file import PART_SUFFIX


@dataclass(frozen=True)
class KeepUntilCopied(Retention):
    """Keeps every checkpoint whose copy was not read back yet."""

    tier: LocalTier

    def kept(self, created_s: Mapping[int, float]) -> set[int]:
        return self.tier.drain.queue.unsettled(created_s)


class LocalTier(DirectoryStore):
    """A DirectoryStore that hands each new checkpoint to a Drain.

    The drain starts with `Drain.start` and ends with `release`. Of several ranks, rank 0 has the
    lock and writes checkpoints; all of them take part in the drain.
    """

    def __init__(self, directory: Path, options: Remote, ranks: Control = ALONE) -> None:
        """Raises OptionError in all ranks alike."""
        super().__init__(directory)
        limit, count = options.rate_bytes_per_s, ranks.world.size
        if limit is not None:
            options = replace(options, bandwidth_limit=max(1, limit // count))
        self.remote = RemoteTier(options)
        self.remote.check(self.directory)
        self.rates = TierHistory()
        self.drain = Drain(self, self.remote, self.rates, ranks)

    def release(self) -> None:
        """End the drain and release the lock of the directory.

        A drain that still waits for an answer of the remote tier may publish a copy. So the lock
        stays until it has ended, and a RuntimeWarning says so.
        """
        if self.drain.stop() or not self.drain.leads:
            super().release()
            return
        if not interpreter_end.begun():  # else the lock ends with the process
            name = "iobench-release"
            threading.Thread(target=self._release_later, name=name, daemon=True).start()
        warnings.warn(
            f"{self} stays locked until {self.remote} answers: a copy is on its way",
            RuntimeWarning,
            stacklevel=2,
        )

    def _release_later(self) -> None:
        while not self.drain.stop():
            pass
        super().release()

    @contextmanager
    def staged(
        self, step: int, *, serial: int, replace: bool = False, shared: bool = False
    ) -> Iterator[Staged]:
        began_s = time.monotonic()
        with self.drain.saving():
            with super().staged(step, serial=serial, replace=replace, shared=shared) as staged:
                yield staged
            self.drain.saved(step, serial, time.monotonic() - began_s)

    def remove(self, step: int) -> None:
        """Remove the checkpoint in the local tier."""
        super().remove(step)
        self.drain.queue.retired(step)

    def remove_remote(self, step: int) -> None:
        """Remove the checkpoint in the remote tier, and do not copy it any more.

        Raises TransferError; then the next Checkpointer copies it.
        """
        self.drain.queue.forget(step)
        self.remote.remove(step)

    def saving(self) -> AbstractContextManager[None]:
        """Let the copies wait while the body writes."""
        return self.drain.saving()

    @contextmanager
    def target(self, target: PartTarget, limit_s: float | None) -> Iterator[PartTarget]:
        """Yield `target`, which is in the remote tier, with the writer and the rate there.

        Raises TransferError when what is written there takes longer than `limit_s`.
        """
        with self.remote.using(limit_s, str(target.directory)) as writer:
            rate = self.remote.options.rate_bytes_per_s
            yield replace(target, writer=writer, rate_bytes_per_s=rate)

    def probe(self, target: PartTarget, memory: Bytes) -> None:
        """Write `memory` durably to a file here, like the files of `target`; it is removed again.

        Raises TransferError and other errors of the writer.
        """
        name = f".probe.{secrets.token_hex(4)}{PART_SUFFIX}"
        path = self.directory / name
        try:
            image = target.limited(FileImage.of(name, [memory]))
            target.writer.write(image, self.directory, sync_directory=False)
        finally:
            with suppress(FileNotFoundError), transfer_errors("removing", path):
                path.unlink()

    def probed(self, size_bytes: int, elapsed_s: float, *, ok: bool) -> None:
        """Record the probes of all ranks, in rank 0."""
        self.rates.add(LOCAL, size_bytes, elapsed_s, ok=ok)

    def followed(self, save: Save, serial: int, *, direct: bool) -> None:
        """Record a commit in another rank than 0, until that tells its state.

        `direct`: it is durable in the remote tier, and not in the local one.
        """
        self.drain.queue.learn(Queued.of(save, serial, direct=direct), newer=True)

    def copies(self, save: Save) -> list[Copy]:
        """Return where the copies of `save` are, nearest first."""
        if save.status in ("copying", "waiting", "writing"):
            return [Copy(tier="memory", state="volatile")]
        entry = self.drain.queue.get(save.step)
        if save.status != "committed" or entry is None:
            return []
        remote = Copy(
            tier=str(self.remote),
            state=entry.state,
            eta_s=self.drain.eta_s(save.step),
            durable_at_s=entry.durable_at_s,
        )
        return [Copy(tier=str(self), state="durable"), remote] if entry.local else [remote]


_LEAST_PROBE, _LARGEST_PROBE = 4 * MIB, 64 * MIB
"""A smaller probe would measure the fixed time of a write."""


@dataclass(kw_only=True)
class RemotePlace:
    """The remote tier. A save that fails there, or takes longer than `limit_s`, goes to `local`."""

    tier: LocalTier
    local: LocalPlace
    size_bytes: int
    decision: str
    probe: bool
    limit_s: float | None
    remote: bool = field(default=True, init=False)
    _began_s: float = field(default_factory=time.monotonic, init=False)

    @property
    def store(self) -> CheckpointStore:
        store = self.tier.remote.store
        return store.using(self.writer) if isinstance(store, ObjectStore) else store

    @property
    def writer(self) -> Writer:
        return self.tier.remote.direct_writer

    @contextmanager
    def staged(self, save: Save, serial: int) -> Iterator[Staged]:
        remote = self.tier.remote
        where = f"{remote}, step {save.step}"
        with self.tier.drain.saving(), remote.using(self.limit_s, where):
            if not remote.is_open:
                raise TransferError(f"{remote}: it does not answer")
            shared, replace = self.local.shared, remote.holds(save.step)
            with self.store.staged(
                save.step, serial=serial, replace=replace, shared=shared
            ) as staged:
                yield staged

    def committed(self, save: Save, manifest: Manifest) -> None:
        elapsed_s, size, tier = time.monotonic() - self._began_s, manifest.size_bytes, self.tier
        try:  # first: the drain forgets what the ledger of the remote tier does not have
            tier.remote.recorded(save.step, manifest.serial, save.created_s, size)
        finally:
            tier.drain.sent_directly(save, manifest.serial, size, elapsed_s)

    def instead(self, save: Save, failure: BaseException) -> LocalPlace | None:
        of_place = failure.of_place if isinstance(failure, VoteError) else True
        if not of_place or not isinstance(failure, IobenchError | VoteError):
            return None
        tier, elapsed_s = self.tier, time.monotonic() - self._began_s
        tier.rates.add(REMOTE, self.size_bytes, elapsed_s, ok=False)
        tier.drain.untidy = True
        self.local.warning = (
            f"step {save.step} is written to {tier}, because {tier.remote} failed: {failure}"
        )
        return self.local

    def probe_bytes(self, ranks: int) -> int:
        part = max(_LEAST_PROBE, min(self.size_bytes // 64, _LARGEST_PROBE))
        return -(-min(self.size_bytes, part) // ranks) if self.probe else 0


@dataclass(frozen=True)
class Placing:
    """Chooses the place of each save by `choice`, in rank 0. Of the local tier: `writer`, `ledger`.

    `shared`: several ranks write.
    """

    tier: LocalTier
    writer: Writer
    ledger: Ledger
    choice: Placement
    shared: bool

    def place(self, save: Save, content: Content) -> Place:
        """Return the place of `save`. Raises TransferError when the tiers cannot be looked at."""
        size, tier = content.job_bytes, self.tier
        if self.ledger.holds(save.step):
            found = PlacementDecision(tier=LOCAL, reason="it replaces a local checkpoint")
        else:
            closed = self._closed(size)
            found = choose(tier.rates, self.choice.goal, size_bytes=size, closed=closed)
        tier.rates.current = found.tier
        local = LocalPlace(
            store=tier,
            writer=self.writer,
            ledger=self.ledger,
            shared=self.shared,
            decision=found.reason,
        )
        if found.tier == LOCAL:
            return local
        return RemotePlace(
            tier=tier,
            local=local,
            size_bytes=size,
            decision=found.reason,
            probe=found.probe,
            limit_s=found.limit_s,
        )

    def _closed(self, size_bytes: int) -> dict[str, str]:
        """Return the tiers that cannot take so many bytes, with the reason."""
        closed = {} if self.tier.remote.is_open else {REMOTE: f"{REMOTE} does not answer"}
        with transfer_errors("measuring", self.tier.directory):
            free = shutil.disk_usage(self.tier.directory).free
        return closed | (
            {LOCAL: f"{LOCAL} has {format_size(free)} free"} if free < size_bytes else {}
        )
