"""LocalTier: the directory of the checkpoints, which are copied from it to the remote tier."""

from __future__ import annotations

import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from iobench.checkpoint.place import PartTarget
from iobench.checkpoint.retention import Retention
from iobench.checkpoint.save import Copy, Save
from iobench.checkpoint.staged import Staged
from iobench.checkpoint.store import DirectoryStore
from iobench.errors import transfer_errors
from iobench.ranks.control import ALONE, Control
from iobench.remote.drain import Drain
from iobench.remote.placement import LOCAL, TierHistory
from iobench.remote.remote import Remote, RemoteTier
from iobench.writers.blocks import interpreter_end
from iobench.writers.image import Bytes, FileImage
from iobench.writers.local.new_file import PART_SUFFIX


class KeepUntilCopied(Retention):
    """What `keep` keeps, and every checkpoint whose copy was not read back yet."""

    def __init__(
        self, keep: Retention, unsettled: Callable[[Mapping[int, float]], set[int]]
    ) -> None:
        self._keep, self._unsettled = keep, unsettled

    def kept(self, created_s: Mapping[int, float]) -> set[int]:
        return self._keep.kept(created_s) | self._unsettled(created_s)


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

    def keeping(self, keep: Retention) -> Retention:
        """Return `keep`, which also keeps what is not in the remote tier yet."""
        return KeepUntilCopied(keep, self.drain.queue.unsettled)

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
        self.drain.join()
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

        Raises TransferError; then it is copied as before.
        """
        entry = self.drain.queue.get(step)
        self.drain.queue.forget(step)
        try:
            self.remote.remove(step)
        except BaseException:
            if entry is not None:
                self.drain.queue.put(entry, new=False)
            raise

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
        """Record a commit in another rank than 0; `direct`: it is in the remote tier."""
        self.drain.committed(save, serial, direct=direct)

    def copies(self, save: Save) -> list[Copy]:
        """Return where the copies of `save` are, nearest first."""
        if save.status in ("copying", "waiting", "writing"):
            return [Copy(tier="memory", state="volatile")]
        entry = self.drain.queue.get(save.step)
        if save.status != "committed" or entry is None:
            return []
        eta_s = self.drain.eta_s(save.step)
        local = [Copy(tier=str(self), state="durable")] if entry.local else []
        return [*local, entry.copy_in(str(self.remote), eta_s)]
