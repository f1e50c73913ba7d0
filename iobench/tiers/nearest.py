"""Nearest: restores a checkpoint from the nearest tier that has a valid copy of it."""

from __future__ import annotations

import errno
import os
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.order import by_age, outlines
from iobench.checkpoint.restore import Loaded, OnCorrupt, Read, restore
from iobench.checkpoint.store import CheckpointStore, DirectoryStore
from iobench.errors import DataMismatchError, IobenchError, TargetError, TransferError
from iobench.tiers.local_tier import LocalTier
from iobench.writers.base import Writer
from iobench.writers.transfer import Transfer

__all__ = ["Nearest"]

_ANSWER_S = 5.0
"""How long a restore waits for a list of the remote tier, when the local tier has checkpoints."""


def _is_new(store: CheckpointStore) -> bool:
    """Return whether it is a directory that nothing was copied to yet."""
    return isinstance(store, DirectoryStore) and not os.path.lexists(store.directory)


_FULL = (errno.ENOSPC, errno.EDQUOT)
"""With these a tier takes no copies, and can be read."""


class Nearest:
    """The checkpoints of both tiers, for one restore: the read side of a CheckpointStore.

    `ask` comes first. A step that both tiers have is read from the local one; when that copy is
    damaged, from the remote one, if it is of the same save. A later save of the step, made by
    another node, counts instead of the local one. `sources` says what was read, and why. `known`
    has the serial numbers of the local checkpoints.
    """

    def __init__(
        self, local: LocalTier, writer: Writer, read: Read, known: Mapping[int, int]
    ) -> None:
        self._known = known
        self._local, self._writer, self._read = local, writer, read
        self._remote = local.remote.store
        self._remote_writer = local.remote.writer
        self._in_remote: dict[int, int | None] = {}
        self.sources: dict[str, str] = {}
        self.readers = self._remote.readers

    def __str__(self) -> str:
        return str(self._local)

    def ask(self) -> None:
        """List the remote tier. Without an answer, only the local one counts, with a warning.

        Raises what the remote tier raises if the local one has no checkpoint.
        """
        here = self._local.steps()
        failure = self._local.drain.failure if here else None
        if failure is None or getattr(failure, "errno", None) in _FULL:
            failure = self._list(_ANSWER_S if here else None)
        if failure is not None and not here:
            raise failure
        if failure is not None:
            warnings.warn(
                f"{self._remote} cannot be asked for checkpoints ({failure}): the newest one of "
                f"{self._local} counts",
                RuntimeWarning,
                stacklevel=4,
            )

    def _list(self, within_s: float | None) -> Exception | None:
        """List the remote tier in a thread; return why there is no answer, or None."""
        found: dict[int, int | None] = {}
        failures: list[Exception] = []

        def ask() -> None:
            try:
                if _is_new(self._remote):
                    return
                found.update(dict.fromkeys(self._remote.steps()))
                found.update(self._remote.serials())
                unknown = [step for step, serial in found.items() if serial is None]
                for step, manifest in outlines(self._remote, unknown).items():
                    found[step] = manifest.serial if manifest else None
            except Exception as error:  # noqa: BLE001 -- returned below
                failures.append(error)

        thread = threading.Thread(target=ask, name="iobench-list", daemon=True)
        thread.start()
        thread.join(within_s)
        if thread.is_alive():
            return TransferError(f"no answer within {_ANSWER_S:g} s")
        if failures:
            return failures[0]
        self._in_remote = found
        return None

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

    def _counted(self) -> dict[int, int]:
        """Return the serial numbers of the local checkpoints that count."""
        return {step: one for step, one in self._known.items() if not self._is_outdated(step)}

    def restore(
        self, step: int | Literal["latest"], *, on_corrupt: OnCorrupt, like: Any
    ) -> tuple[Any, Loaded]:
        """Restore like `iobench.checkpoint.restore.restore`, from both tiers."""
        known = self._counted() if step == "latest" else None
        state, loaded = restore(
            self, self._writer, step,  # type: ignore[arg-type]  # the read side alone
            on_corrupt=on_corrupt, like=like, known=known, read=self.read,
        )  # fmt: skip
        return state, Loaded(
            step=loaded.step,
            transfer=loaded.transfer,
            passed_over=loaded.passed_over,
            sources=dict(self.sources),
        )

    def newest(self) -> int | None:
        """Return the step that was saved last."""
        steps = by_age(self, self._counted())  # type: ignore[arg-type]  # the read side alone
        return steps[-1] if steps else None
