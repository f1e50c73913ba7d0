"""Nearest: which checkpoints the local and the remote tier have, and restores from both."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.restore import Loaded, OnCorrupt, restore
from iobench.checkpoint.retention import by_age, outlines
from iobench.checkpoint.store import CheckpointStore, DirectoryStore
from iobench.errors import IobenchError, TransferError
from iobench.remote.both_tiers import Listed, TieredCandidates
from iobench.remote.local_tier import LocalTier
from iobench.writers.base import Writer

__all__ = ["Nearest", "RemoteList"]


class RemoteList:
    """One list of the checkpoints of `store`: its steps, and serial numbers where it has them.

    The thread starts at once and is never joined: a server that hangs delays only those who call
    `wait`. After `done` is set, `found` and `failure` do not change.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self.found: dict[int, int | None] = {}
        self.failure: Exception | None = None
        self.done = threading.Event()
        self._store, self._began_s = store, time.monotonic()
        threading.Thread(target=self._ask, name="iobench-list", daemon=True).start()

    def wait(self, within_s: float | None) -> Exception | None:
        """Wait until `within_s` after the start at most; return why there is no answer, or None."""
        left_s = None
        if within_s is not None:
            left_s = max(0.0, self._began_s + within_s - time.monotonic())
        if not self.done.wait(left_s):
            return TransferError(f"no answer within {within_s:g} s")
        return self.failure

    def _ask(self) -> None:
        try:
            self.found = self._listed()
        except Exception as error:  # noqa: BLE001 -- returned by `wait`
            self.failure = error
        finally:
            self.done.set()

    def _listed(self) -> dict[int, int | None]:
        if _is_new(self._store):
            return {}
        found: dict[int, int | None] = dict.fromkeys(self._store.steps())
        found.update(self._store.serials())
        unknown = [step for step, serial in found.items() if serial is None]
        for step, manifest in outlines(self._store, unknown).items():
            found[step] = manifest.serial if manifest else None
        return found


def _is_new(store: CheckpointStore) -> bool:
    """Return whether it is a directory that nothing was copied to yet."""
    return isinstance(store, DirectoryStore) and not os.path.lexists(store.directory)


_ANSWER_S = 5.0
"""How long a restore waits for a list of the remote tier, when the local tier has checkpoints."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
"""With these a tier takes no copies, and can be read."""


class Nearest:
    """The checkpoints of both tiers, for one restore, as the process that drains sees them.

    `ask` comes first, or `restore`, which asks while it reads. A step that both tiers have is read
    from the local one, with the help of the remote one if it is of the same save. A later save of
    the step, made by another node, counts instead of the local one: see TieredCandidates. `known`
    has the serial numbers of the local checkpoints.
    """

    def __init__(self, local: LocalTier, writer: Writer, known: Mapping[int, int]) -> None:
        self._local, self._writer, self._known = local, writer, known
        self._listing: RemoteList | None = None
        self._failure: Exception | None = None
        self._settled = self._has_local = False
        self._remote = local.remote.store
        self._remote_writer = local.remote.writer
        self._in_remote: dict[int, int | None] = {}

    def begin(self) -> None:
        """Ask for a list of the remote tier, unless the drain knows that it fails."""
        if self._listing is not None:
            return
        self._has_local = bool(self._local.steps())
        known = self._local.drain.failure if self._has_local else None
        if known is None or getattr(known, "errno", None) in _FULL:
            self._listing = RemoteList(self._remote)
        else:
            self._failure = known

    def ask(self) -> None:
        """Wait for the list. Without an answer only the local tier counts, with a RuntimeWarning.

        Raises what the remote tier raises if the local one has no checkpoint.
        """
        self.begin()
        if self._settled:
            return
        failure = self._failure
        if self._listing is not None:
            failure = self._listing.wait(_ANSWER_S if self._has_local else None)
            if failure is None:
                self._in_remote = self._listing.found
        self._settled = True
        if failure is not None and not self._has_local:
            raise failure
        if failure is not None:
            warnings.warn(
                f"{self._remote} cannot be asked for checkpoints ({failure}): the newest one of "
                f"{self._local} counts",
                RuntimeWarning,
                stacklevel=4,
            )

    @property
    def last_serial(self) -> int:
        """The greatest serial number in the remote tier; 0 without one."""
        return max((serial or 0 for serial in self._in_remote.values()), default=0)

    def listed(self) -> list[Listed]:
        """Return all checkpoints. `ask` comes first."""
        own = set(self._local.steps())
        found = []
        for step in sorted(own | self._in_remote.keys()):
            here, there = self._known.get(step), self._in_remote.get(step)
            later = here is not None and there is not None and there > here
            place = str(self._remote.locate(step)) if step in self._in_remote else ""
            serial = there if later or here is None else here
            found.append(Listed(step, serial, step in own and not later, place))
        return found

    def candidates(self) -> TieredCandidates:
        """Return the checkpoints of both tiers. `ask` comes first."""
        return TieredCandidates(
            self._local,
            self._writer,
            str(self._remote),
            self._remote_writer,
            self.listed(),
            late=self._late,
        )

    def _late(self) -> dict[int, str]:
        """Wait for the list; return the places in the remote tier by step."""
        if self._listing is None or self._listing.wait(_ANSWER_S) is not None:
            return {}
        return {step: str(self._remote.locate(step)) for step in self._listing.found}

    def newest(self) -> int | None:
        """Return the step that was saved last."""
        steps = by_age(self.candidates())
        return steps[-1] if steps else None

    def remote_copy(self, manifest: Manifest) -> tuple[str | Path, Writer] | None:
        """Return where the remote tier has this very save, and its writer; None if it has not."""
        self.ask()
        step = manifest.step
        if step not in self._in_remote or self._remote.manifest(step) != manifest:
            return None
        return self._remote.locate(step), self._remote_writer

    def restore(
        self,
        step: int | Literal["latest"],
        *,
        on_corrupt: OnCorrupt,
        like: Any,
        offload: Callable[[Manifest], None] | None = None,
    ) -> tuple[Any, Loaded]:
        """Restore like `iobench.checkpoint.restore.restore`, from both tiers.

        The local checkpoint is read while the remote tier is asked whether it has a later one.
        """
        self.begin()
        early = None
        asked = self._listing is not None and not self._listing.done.is_set()
        if self._has_local and asked and not self._settled:
            with contextlib.suppress(IobenchError):  # then both tiers are looked at
                early = self._restored(step, "raise", like, offload)
        self.ask()
        if early is not None and not self._has_later(step, early[1].step):
            return early
        early = None  # its memory is freed
        return self._restored(step, on_corrupt, like, offload)

    def _has_later(self, step: int | Literal["latest"], restored: int) -> bool:
        """Return whether the remote tier has a later save than the one that was restored."""
        found = {one.step: one for one in self.listed()}
        return not found[restored].local or (step == "latest" and self.newest() != restored)

    def _restored(
        self,
        step: int | Literal["latest"],
        on_corrupt: OnCorrupt,
        like: Any,
        offload: Callable[[Manifest], None] | None,
    ) -> tuple[Any, Loaded]:
        return restore(self.candidates(), step, on_corrupt=on_corrupt, like=like, offload=offload)
