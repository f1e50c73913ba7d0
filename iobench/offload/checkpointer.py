"""OffloadCheckpointer: checkpoints whose optimizer state is a pinned generation on storage."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from iobench.checkpoint.commit import Committer
from iobench.checkpoint.manifest import Manifest, PinnedGeneration
from iobench.checkpoint.retention import KeepLast
from iobench.checkpoint.safetensors_files import SafetensorsFormat
from iobench.checkpoint.save import Save
from iobench.checkpoint.store import DirectoryStore
from iobench.checkpointer.checkpointer import Checkpointer
from iobench.errors import DataMismatchError, OptionError
from iobench.offload.held_pins import HeldPins
from iobench.offload.pin_ledger import PinLedger
from iobench.writers.base import Writer
from iobench.writers.blocks import interpreter_end

if TYPE_CHECKING:
    from iobench.remote.nearest import Nearest

__all__ = ["OffloadCheckpointer"]


class OffloadCheckpointer(Checkpointer):
    """The Checkpointer of one process with `offload=optimizer`.

    Each save pins the optimizer's state, which copies nothing, and its manifest names the pin. The
    pins of checkpoints that retention removes are released by the next call.
    """

    _offloaded: HeldPins
    _pins: PinLedger

    def _set_up(self, location: str | Path, **options: Any) -> None:
        self._offloaded = _pins_of(options["offload"], options)
        super()._set_up(location, **options)
        interpreter_end.at_end(self, OffloadCheckpointer._at_end)
        try:
            self._pins.start()
        except BaseException:
            super().close()
            raise

    def _new_committer(self, limit: int | None) -> Committer[Any]:
        if not isinstance(self._store, DirectoryStore):
            self._store.release()
            raise OptionError(f"offload: {self._store} must be a directory")
        exports = self._tier is not None
        self._pins = PinLedger(self._offloaded, self._store, exports=exports)
        if self._tier is not None:
            self._tier.drain.offload = self._offloaded
        committer = super()._new_committer(limit)
        committer.format = SafetensorsFormat(pinning=self._pins)
        committer.participant = self._pins
        return committer

    def _begin(self, state: Any, step: int) -> tuple[Any, Save]:
        self._check_usable()
        self._pins.make_room(self._finish_saves, self._ledger.tidy, self._settle_copies)
        content, save = super()._begin(state, step)
        try:
            self._pins.hold(save)
        except BaseException as error:
            save.fail(error)
            raise
        return content, save

    def _settle_copies(self) -> None:
        """Wait until a pin is free because the remote tier has the state; see Drain.settle_one."""
        while self._tier is not None and self._pins.full and self._tier.drain.settle_one():
            self._ledger.tidy()
            self._pins.sweep()

    def _finish_saves(self) -> None:
        self._pins.settle()
        self._finish_copy()
        self._persister.wait()

    def wait(self, until: Literal["committed", "remote"] = "committed") -> None:
        """Wait until every save is committed, superseded or failed. Raise what failed."""
        self._check_usable()
        with _then(lambda: super(OffloadCheckpointer, self).wait(until)):
            self._pins.settle()
        self._pins.sweep()

    def load(self, step: int | Literal["latest"] = "latest", **options: Any) -> Any:
        """Return the state of a checkpoint; model and optimizer go on from its generation.

        Only the parameters are read, in addition to the checkpoint's files, unless only the remote
        tier has the state. See Checkpointer.load. When nothing can be restored, the optimizer is
        closed.
        """
        self._check_usable()
        self._pins.settle()
        return super().load(step, **options)

    def _restore_offload(self, nearest: Nearest | None) -> Callable[[Manifest], None]:
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
        self, manifest: Manifest, nearest: Nearest | None
    ) -> tuple[str | Path, Writer] | None:
        """Return where the remote tier has the state, and its writer; None if it has not."""
        if nearest is None or not all(one.files for one in manifest.pinned):
            return None
        return nearest.remote_copy(manifest)

    def _tell(self, message: str) -> None:
        warnings.warn(message, RuntimeWarning, stacklevel=3)

    def _at_end(self) -> None:
        with _then(super()._at_end):
            if self._unclosed.alive:
                self._pins.settle()

    def remove(self, step: int) -> None:
        """Remove the checkpoint `step`, and release its pin. Waits for saves first."""
        self._check_usable()
        self._pins.settle()
        super().remove(step)
        self._pins.sweep()

    def close(self) -> None:
        """Wait for every save, release the pins that none needs, and close. See Checkpointer.

        The optimizer stays open.
        """
        if not self._unclosed.alive or os.getpid() != self._pid:
            return
        with _then(super().close):
            self._finish_saves()
            self._pins.sweep()


def _pins_of(offload: Any, options: Mapping[str, Any]) -> HeldPins:
    """Return the pins of `offload=` for a Checkpointer with `options`.

    Raises OptionError when they do not go together.
    """
    state: HeldPins = offload.checkpoint_pins()
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
def _then(finish: Callable[[], None]) -> Iterator[None]:
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
