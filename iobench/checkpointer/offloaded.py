"""OffloadCheckpointer: checkpoints whose optimizer state is a pinned generation on storage."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from iobench.checkpoint.commit import Committer
from iobench.checkpoint.manifest import FileRecord, Manifest
from iobench.checkpoint.pin_ledger import PinLedger
from iobench.checkpoint.restore import Loaded, OnCorrupt, restore
from iobench.checkpoint.save import Save
from iobench.checkpoint.serialized import Serialized
from iobench.checkpoint.store import DirectoryStore
from iobench.checkpointer.pinned_saves import PinnedSaves, pinned_state, then
from iobench.errors import OptionError
from iobench.writers.blocks import interpreter_end
from iobench.writers.image import Bytes, FileImage

__all__ = ["OffloadCheckpointer"]


@dataclass(frozen=True, kw_only=True)
class _PinningCommitter(Committer):
    """Publishes a manifest only when the generation that it names is durable."""

    pins: PinLedger

    def commit(
        self,
        save: Save,
        serialized: Serialized,
        memory: Bytes | None = None,
        *,
        rate_bytes_per_s: int | None = None,
    ) -> Manifest:
        try:
            return super().commit(save, serialized, memory, rate_bytes_per_s=rate_bytes_per_s)
        finally:
            self.pins.ended(save)

    def _more_files(self, save: Save) -> list[FileImage]:
        return self.pins.durable(save)[1] if self.pins.exports else []

    def _manifest(self, save: Save, files: tuple[FileRecord, ...], serial: int) -> Manifest:
        pinned, _ = self.pins.durable(save)
        return msgspec.structs.replace(super()._manifest(save, files, serial), offload=pinned)


class OffloadCheckpointer(PinnedSaves):
    """The Checkpointer of one process with `offload=optimizer`.

    Each save pins the optimizer's state, which copies nothing, and its manifest names the pin. The
    pins of checkpoints that retention removes are released by the next call.
    """

    _pins: PinLedger

    def _set_up(self, location: str | Path, **options: Any) -> None:
        self._offloaded = pinned_state(options["offload"], options)
        super()._set_up(location, **options)
        interpreter_end.at_end(self, OffloadCheckpointer._at_end)
        try:
            self._pins.start()
        except BaseException:
            super().close()
            raise

    def _new_committer(self) -> Committer:
        if not isinstance(self._store, DirectoryStore):
            self._store.release()
            raise OptionError(f"offload: {self._store} must be a directory")
        exports = self._tier is not None
        self._pins = PinLedger(self._offloaded, self._store, exports=exports)
        if self._tier is not None:
            self._tier.drain.offload = self._offloaded
        return _PinningCommitter(
            store=self._store,
            writer=self._writer,
            ledger=self._ledger,
            pins=self._pins,
        )

    def _begin(self, state: Any, step: int, *, late: bool = False) -> tuple[Any, Save]:
        self._check_usable()
        self._pins.make_room(self._finish_saves, self._ledger.tidy, self._settle_copies)
        content, save = super()._begin(state, step, late=late)
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

    def wait(self, until: Literal["committed", "remote"] = "committed") -> None:
        """Wait until every save is committed, superseded or failed. Raise what failed."""
        super().wait(until)
        self._pins.sweep()

    def _restore_stored(
        self, step: int | Literal["latest"], on_corrupt: OnCorrupt, like: Any
    ) -> tuple[Any, Loaded]:
        if self._tier is not None:
            return super()._restore_stored(step, on_corrupt, like)
        state, loaded = restore(
            self._store,
            self._writer,
            step,
            on_corrupt=on_corrupt,
            like=like,
            known=self._ledger.serials() if step == "latest" else None,
            read=self._read,
            offload=self._restore_offload(None),
        )
        self._ledger.resumed_from(loaded.step)
        return state, loaded

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
        with then(super().close):
            self._finish_saves()
            self._pins.sweep()
