"""What a commit writes, and where: the protocols `Format`, `Place`, `SaveParticipant`.

The Committer knows no more of them. Formats and places know nothing of the Committer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from iobench.checkpoint.checksums import PieceDigests
from iobench.checkpoint.ledger import Ledger
from iobench.checkpoint.manifest import FileRecord, Manifest, PinnedGeneration
from iobench.checkpoint.ranked.messages import Part
from iobench.checkpoint.rate_limit import RateLimit
from iobench.checkpoint.retention import Retention
from iobench.checkpoint.save import Save
from iobench.checkpoint.store import CheckpointStore, Staged
from iobench.ranks.world import World
from iobench.writers.base import Writer
from iobench.writers.image import Bytes, FileImage
from iobench.writers.transfer import Transfer

RemoteCopyOf = Callable[[Manifest], tuple[str | Path, Writer] | None]
"""Returns where a remote tier has this very checkpoint, and its writer; None if it has not."""


class SaveParticipant:
    """The state of an optimizer that is on storage already. This one has none.

    A save holds it as it is, which copies nothing, and the manifest names what it holds. So the
    manifest is written when that is durable. In a job of several ranks the files have the state
    too, for another number of ranks. `durable` and `ended` are called by the thread that commits,
    the rest by the trainer's.
    """

    holds = False
    """Whether a checkpoint names what it holds, which `restore` needs."""
    exports = False
    """Whether a remote tier gets the state too, so that files of the checkpoint describe it."""

    def check(
        self, *, keep: Retention | None, placed: bool, tiers: Sequence[Any], world: World
    ) -> None:
        """Raise OptionError for options of a Checkpointer that it does not go together with."""

    def open(self, store: CheckpointStore, drain: Any) -> None:
        """Take part in the saves to `store`; `drain` copies them to a remote tier, or is None."""

    def start(self) -> None:
        """Look which checkpoints there are; release what no checkpoint needs."""

    def make_room(self, freeing: Iterator[None]) -> None:
        """Release what is free; while nothing more can be held, let `freeing` free one thing more.

        Raises UsageError at its end.
        """

    def added_to(self, state: Any) -> Any:
        """Return `state` with what the files have of the participant. Asks no other rank."""
        return state

    def hold(self, save: Save) -> None:
        """Hold the state as it is now, for `save`."""

    def durable(self, save: Save) -> tuple[PinnedGeneration | None, list[FileImage]]:
        """Wait until what `save` holds is durable. Return it, and the files that describe it.

        None if it holds nothing.
        """
        del save
        return None, []

    def ended(self, save: Save) -> None:
        """The commit of `save` has ended, or failed."""

    def settle(self) -> None:
        """Wait until what pending saves hold is durable. Raises why it never will be."""

    def sweep(self) -> None:
        """Release what no checkpoint and no pending save needs."""

    def restore(self, manifest: Manifest, remote_copy: RemoteCopyOf | None) -> None:
        """Go on from the state of this checkpoint, in one process. Raises DataMismatchError."""

    def expected(self, like: Any) -> Any:
        """Return `like` with what `added_to` adds, without any bytes: for `load(like=...)`."""
        return like

    def take(self, state: Any) -> Any:
        """Go on from what the files have, in all ranks; return `state` without it."""
        return state


@dataclass(frozen=True, kw_only=True)
class PartTarget:
    """Where a rank writes its files of one checkpoint, and how."""

    directory: str | Path
    writer: Writer
    rate_bytes_per_s: int | None = None

    def limited(self, image: FileImage) -> FileImage:
        """Return `image`, which is sent no faster than the limit from now on."""
        rate = self.rate_bytes_per_s
        return RateLimit(rate).limited(image) if rate else image

    @property
    def by_block(self) -> bool:
        """Whether the writer copies the bytes to blocks, see `recorded`."""
        return self.writer.direct and not self.rate_bytes_per_s


class SaveJob(NamedTuple):
    """What this rank writes of a save. The tensors are in `memory`, or else in the trainer's own.

    `content` is of the kind that the Format writes.
    """

    save: Save
    content: Any
    memory: Bytes | None
    target: PartTarget


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a rank has written: `file` has its tensors, and is in memory still.

    `checksum` is that of its part manifest, in a job of several ranks. Otherwise `digests` are the
    checksums of `file`, and `others` the records of further files.
    """

    transfer: Transfer
    file: FileImage
    checksum: str = ""
    digests: PieceDigests | None = None
    others: tuple[FileRecord, ...] = ()


PartOffer = Callable[[FileImage, Part, str | None], None]
"""Takes the bytes of a rank's part, a snapshot, before they are written, for a replica of them.

In rank 0 also the part of the index that has the tensors of all ranks, as JSON."""


class Format(Protocol):
    """The files of a checkpoint."""

    def write(self, job: SaveJob, offer: PartOffer | None) -> Written:
        """Write the files of this rank. On return they are durable, unless `transfer` says no.

        Raises TransferError and other errors of the writer.
        """

    def publish(
        self,
        job: SaveJob,
        own: Written,
        staged: Staged,
        votes: Sequence[str],
        made: Callable[..., Manifest],
        place: Place,
    ) -> Manifest:
        """In rank 0, make what is `staged` a checkpoint. Return its manifest.

        `votes` are the checksums of all parts. `made` makes the manifest, except for the files.
        Raises when the parts are not what the ranks wrote; then there is no checkpoint.
        """

    def discard(self, directory: Path) -> None:
        """Remove what this rank wrote, where rank 0 has not done so. Raises TransferError."""


class Place(Protocol):
    """Where all ranks write one checkpoint. For rank 0."""

    @property
    def store(self) -> CheckpointStore:
        """The checkpoints there."""

    @property
    def writer(self) -> Writer:
        """Through which rank 0 writes, inside of `staged`."""

    @property
    def decision(self) -> str:
        """Why it was chosen, for the manifest."""

    remote: bool
    limit_s: float | None
    """How long each rank may write its part; None: no limit."""

    def staged(self, save: Save, serial: int) -> AbstractContextManager[Staged]:
        """Begin a checkpoint of all ranks."""

    def committed(self, save: Save, manifest: Manifest) -> None:
        """Record it, then remove what retention drops."""

    def instead(self, save: Save, failure: BaseException) -> Place | None:
        """Return where the save is written after this `failure`; None: nowhere."""

    def probe_bytes(self, ranks: int) -> int:
        """Return the bytes that each rank writes to measure the local tier; 0: it is not."""


@dataclass(kw_only=True)
class LocalPlace:
    """The directory or bucket of the Checkpointer. `warning` is given after the commit."""

    store: CheckpointStore
    writer: Writer
    ledger: Ledger
    shared: bool
    """Whether several ranks write there."""
    decision: str = ""
    warning: str = ""
    remote: bool = field(default=False, init=False)
    limit_s: float | None = field(default=None, init=False)

    def staged(self, save: Save, serial: int) -> AbstractContextManager[Staged]:
        replace = self.ledger.holds(save.step)
        return self.store.staged(save.step, serial=serial, replace=replace, shared=self.shared)

    def committed(self, save: Save, manifest: Manifest) -> None:
        self.ledger.committed(save, manifest.serial)
        if self.warning:  # last: a warnings filter may turn it into an exception
            warnings.warn(self.warning, RuntimeWarning, stacklevel=2)

    def instead(self, save: Save, failure: BaseException) -> None:
        """There is no other place."""

    def probe_bytes(self, ranks: int) -> int:
        del ranks
        return 0


class Tier(Protocol):
    """The local tier, from which checkpoints are copied to a remote one."""

    def saving(self) -> AbstractContextManager[None]:
        """Let the copies wait while the body writes."""

    def target(
        self, target: PartTarget, limit_s: float | None
    ) -> AbstractContextManager[PartTarget]:
        """Yield `target`, which is in the remote tier, with the writer and the rate there."""

    def probe(self, target: PartTarget, memory: Bytes) -> None:
        """Write `memory` to the local tier and remove it. Raises errors of the writer."""

    def probed(self, size_bytes: int, elapsed_s: float, *, ok: bool) -> None:
        """Record the probes of all ranks, in rank 0."""

    def followed(self, save: Save, serial: int, *, direct: bool) -> None:
        """Record a commit in another rank than 0; `direct`: it is in the remote tier."""
