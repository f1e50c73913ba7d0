"""Nearest: restores a checkpoint from the nearest tier that has a valid copy of it."""

from __future__ import annotations

import contextlib
import errno
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.order import by_age
from iobench.checkpoint.restore import Loaded, OnCorrupt, Read, restore
from iobench.checkpoint.store import CheckpointStore
from iobench.errors import DataMismatchError, IobenchError, TargetError, TransferError
from iobench.remote.both_tiers import BothTiers, RemoteCheckpoint
from iobench.remote.local_tier import LocalTier
from iobench.remote.remote_list import RemoteList
from iobench.writers.base import Writer
from iobench.writers.transfer import Transfer

__all__ = ["Nearest"]

_ANSWER_S = 5.0
"""How long a restore waits for a list of the remote tier, when the local tier has checkpoints."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
"""With these a tier takes no copies, and can be read."""


class Nearest:
    """The checkpoints of both tiers, for one restore: the read side of a CheckpointStore.

    `ask` comes first, or `restore`, which asks while it reads. A step that both tiers have is read
    from the local one, with the help of the remote one if it is of the same save: see BothTiers. A
    later save of the step, made by another node, counts instead of the local one. `sources` says
    what was read, and why. `known` has the serial numbers of the local checkpoints.
    """

    def __init__(
        self,
        local: LocalTier,
        writer: Writer,
        read: Read,
        known: Mapping[int, int],
    ) -> None:
        self._known = known
        self._listing: RemoteList | None = None
        self._offload: Callable[[Manifest], None] | None = None
        self._failure: Exception | None = None
        self._settled = self._has_local = False
        self._local, self._writer, self._read = local, writer, read
        self._remote = local.remote.store
        self._remote_writer = local.remote.writer
        self._in_remote: dict[int, int | None] = {}
        self.sources: dict[str, str] = {}
        self.readers = self._remote.readers

    def __str__(self) -> str:
        return str(self._local)

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
        return max(self.serials().values(), default=0)

    def steps(self) -> list[int]:
        """Return the steps of both tiers."""
        return sorted({*self._local.steps(), *self._in_remote})

    def serials(self) -> dict[int, int]:
        """Return the serial numbers in the remote tier."""
        return {step: serial for step, serial in self._in_remote.items() if serial is not None}

    def manifest(self, step: int, *, files: bool = True) -> Manifest:
        """Return the manifest of the nearest copy that has an undamaged one."""
        problem: IobenchError | None = None
        for store, _ in self._places(step):
            try:
                return store.manifest(step, files=files)
            except (DataMismatchError, TransferError) as error:
                problem = problem or error
        raise problem or TargetError(f"{self}: holds no checkpoint of step {step}")

    def locate(self, step: int) -> str | Path:
        """Return the place of the nearest copy."""
        places = self._places(step)
        return places[0][0].locate(step) if places else self._local.locate(step)

    def _is_outdated(self, step: int) -> bool:
        """Return whether the remote tier has a later save of a step that the local one has."""
        here, there = self._known.get(step), self._in_remote.get(step)
        return here is not None and there is not None and there > here

    def _places(self, step: int) -> list[tuple[CheckpointStore, Writer]]:
        places: list[tuple[CheckpointStore, Writer]] = []
        if step in self._local.steps() and not self._is_outdated(step):
            places.append((self._local, self._writer))
        if step in self._in_remote:
            places.append((self._remote, self._remote_writer))
        return places

    def read(
        self, _: CheckpointStore, writer: Writer, step: int, manifest: Manifest, like: Any
    ) -> tuple[Any, Transfer]:
        """Read the nearest valid copy of the save that `manifest` describes."""
        del writer
        problem: IobenchError | None = None
        self.sources = {}
        for store, own in self._places(step):
            try:
                if problem is not None and store.manifest(step) != manifest:
                    continue  # of another save of this step
                if store is self._local:
                    return self._read_local(step, manifest, like)
                result = self._read(store, own, step, manifest, like)
            except (DataMismatchError, TransferError) as error:
                self.sources[str(store)] = str(error)
                if problem is None:
                    problem = error
                else:
                    problem.add_note(f"the copy in {store}: {error}")
                continue
            if problem is not None:
                message = f"step {step} is read from {store}: {problem}"
                warnings.warn(message, RuntimeWarning, stacklevel=5)
            self.sources[str(store)] = "read"
            return result
        raise problem or TargetError(f"{self}: holds no checkpoint of step {step}")

    def _read_local(self, step: int, manifest: Manifest, like: Any) -> tuple[Any, Transfer]:
        """Read the local copy, with the help of the remote tier. Raises what a read raises."""
        remote = RemoteCheckpoint(
            store=self._remote,
            writer=self._remote_writer,
            step=step,
            is_same=partial(self._is_in_remote, step, manifest),
        )
        tiers = BothTiers(self._writer, remote)
        result = self._read(self._local, tiers, step, manifest, like)
        self.sources = tiers.sources(str(self._local), str(self._remote))
        if tiers.local_problem:
            warnings.warn(
                f"step {step} is read from {self._remote} in part: {tiers.local_problem}",
                RuntimeWarning,
                stacklevel=6,
            )
        return result

    def _is_in_remote(self, step: int, manifest: Manifest) -> bool:
        """Return whether the remote tier has this very save; waits for its list."""
        if self._listing is None or self._listing.wait(_ANSWER_S) is not None:
            return False
        if self._listing.found.get(step, 0) not in (None, manifest.serial):
            return False
        return self._remote.manifest(step) == manifest

    def listed(self) -> list[tuple[int, int | None, bool, str]]:
        """Return all checkpoints: step, serial number, whether the local one counts, and the place
        of the remote one, "" without one. `ask` comes first.
        """
        own, known = set(self._local.steps()), self._counted()
        return [
            (
                step,
                known.get(step, self._in_remote.get(step)),
                step in own and not self._is_outdated(step),
                str(self._remote.locate(step)) if step in self._in_remote else "",
            )
            for step in self.steps()
        ]

    def remote_copy(self, manifest: Manifest) -> tuple[str | Path, Writer] | None:
        """Return where the remote tier has this very save, and its writer; None if it has not."""
        self.ask()
        step = manifest.step
        if step not in self._in_remote or self._remote.manifest(step) != manifest:
            return None
        return self._remote.locate(step), self._remote_writer

    def _counted(self) -> dict[int, int]:
        """Return the serial numbers of the local checkpoints that count."""
        return {step: one for step, one in self._known.items() if not self._is_outdated(step)}

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
        self._offload = offload
        self.begin()
        early = None
        asked = self._listing is not None and not self._listing.done.is_set()
        if self._has_local and asked and not self._settled:
            early = self._restored_early(step, like)
        self.ask()
        if early is not None and not self._has_later(step, early[1].step):
            return early
        early = None  # its memory is freed
        return self._restored(step, on_corrupt, like)

    def _restored_early(
        self, step: int | Literal["latest"], like: Any
    ) -> tuple[Any, Loaded] | None:
        """Restore from the local tier; None if it cannot, then both tiers are looked at."""
        with contextlib.suppress(IobenchError):
            return self._restored(step, "raise", like)
        return None

    def _has_later(self, step: int | Literal["latest"], restored: int) -> bool:
        """Return whether the remote tier has a later save than the one that was restored."""
        if self._is_outdated(restored):
            return True
        return step == "latest" and self.newest() != restored

    def _restored(
        self, step: int | Literal["latest"], on_corrupt: OnCorrupt, like: Any
    ) -> tuple[Any, Loaded]:
        known = self._counted() if step == "latest" else None
        state, loaded = restore(
            self, self._writer, step,  # type: ignore[arg-type]  # the read side alone
            on_corrupt=on_corrupt, like=like, known=known, read=self.read,
            offload=self._offload,
        )  # fmt: skip
        return state, replace(loaded, sources=dict(self.sources))

    def newest(self) -> int | None:
        """Return the step that was saved last."""
        steps = by_age(self, self._counted())  # type: ignore[arg-type]  # the read side alone
        return steps[-1] if steps else None
