"""PinnedSaves: what the Checkpointers with `offload=optimizer` have in common."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from iobench.checkpoint.manifest import Manifest, PinnedGeneration
from iobench.checkpoint.pinned_state import PinnedState
from iobench.checkpoint.retention import KeepLast
from iobench.checkpointer.checkpointer import Checkpointer
from iobench.checkpointer.remote_copies import RemoteCopies
from iobench.errors import DataMismatchError, OptionError
from iobench.writers.base import Writer

__all__ = ["PinnedSaves", "pinned_state", "then"]


class _Pins(Protocol):
    """The pins of this process."""

    def settle(self) -> None:
        """Wait until the pins of pending saves are durable."""


class PinnedSaves(Checkpointer):
    """The waits and loads of a Checkpointer whose saves pin the state of an optimizer."""

    _offloaded: PinnedState
    _pins: _Pins

    def _finish_saves(self) -> None:
        self._pins.settle()
        self._finish_copy()
        self._persister.wait()

    def wait(self, until: Literal["committed", "remote"] = "committed") -> None:
        """Wait until every save is committed, superseded or failed. Raise what failed."""
        self._check_usable()
        with then(lambda: super(PinnedSaves, self).wait(until)):
            self._pins.settle()

    def load(self, step: int | Literal["latest"] = "latest", **options: Any) -> Any:
        """Return the state of a checkpoint; model and optimizer go on from its generation.

        Only the parameters are read, in addition to the checkpoint's files, unless only the remote
        tier has the state. See Checkpointer.load. When nothing can be restored, the optimizer is
        closed.
        """
        self._check_usable()
        self._pins.settle()
        return super().load(step, **options)

    def _restore_offload(self, nearest: RemoteCopies | None) -> Callable[[Manifest], None]:
        def go_on(manifest: Manifest) -> None:
            pinned = manifest.offload
            if pinned is None:
                raise DataMismatchError(
                    f"{self._store}: step {manifest.step} was saved without an offloaded optimizer"
                )
            if not isinstance(pinned, PinnedGeneration):
                raise DataMismatchError(
                    f"{self._store}: step {manifest.step} was saved by {len(pinned)} ranks with "
                    "ShardedAdamW, which this iobench does not have"
                )
            try:
                self._offloaded.restore(pinned)
            except DataMismatchError as error:
                found = self._copy_of(manifest, nearest)
                if found is None:
                    raise
                self._tell(f"step {manifest.step}: the optimizer is read from {found[0]}: {error}")
                self._offloaded.restore_files(manifest, *found)

        return go_on

    def _copy_of(
        self, manifest: Manifest, nearest: RemoteCopies | None
    ) -> tuple[str | Path, Writer] | None:
        """Return where the remote tier has the state, and its writer; None if it has not."""
        if nearest is None or not all(one.files for one in manifest.pinned):
            return None
        return nearest.remote_copy(manifest)

    def _tell(self, message: str) -> None:
        warnings.warn(message, RuntimeWarning, stacklevel=3)

    def _at_end(self) -> None:
        with then(super()._at_end):
            if self._unclosed.alive:
                self._pins.settle()


def pinned_state(offload: Any, options: Mapping[str, Any]) -> PinnedState:
    """Return the state of `offload=` that a Checkpointer with `options` pins.

    Raises OptionError when they do not go together.
    """
    if not callable(getattr(offload, "checkpoint_pins", None)):
        raise OptionError(f"offload={offload!r:.80}: takes an optimizer of iobench.offload")
    state: PinnedState = offload.checkpoint_pins()
    if any(type(one).__name__ != "Remote" for one in options.get("tiers") or ()):
        raise OptionError("offload: takes tiers=[Remote(...)]; a snapshot has no optimizer state")
    if options.get("placement") is not None:
        raise OptionError("offload: not with placement; a generation is in local storage first")
    keep = options.get("keep")
    if keep is None or (isinstance(keep, KeepLast) and keep.count >= state.most):
        kept = "keeps all checkpoints" if keep is None else f"keeps {keep.count}"
        raise OptionError(
            f"offload: the optimizer has pins={state.most} and the Checkpointer {kept}; it "
            "needs one pin more than keep=KeepLast(n) keeps"
        )
    return state


@contextmanager
def then(finish: Callable[[], None]) -> Iterator[None]:
    """Call `finish` after the block, also when that fails: its error is the one that is raised."""
    try:
        yield
    except BaseException as error:
        try:
            finish()
        except Exception as other:  # noqa: BLE001 -- the saves failed because the engine did
            error.add_note(f"a save failed too: {other!r}")
        raise
    finish()
