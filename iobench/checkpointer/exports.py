"""Exports: a Checkpointer's exports in the background, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from iobench.checkpoint.ledger import Ledger
from iobench.checkpoint.persister import Persister
from iobench.checkpoint.save import Save
from iobench.errors import UsageError
from iobench.writers.blocks.channel import Channel, Lease

__all__ = ["Exports"]

_NO_LIMIT = 1 << 30


class Exports:
    """A thread that exports checkpoints; `persister` gets what fails, for the trainer."""

    def __init__(self, persister: Persister[Any], ledger: Ledger) -> None:
        self._persister, self._ledger = persister, ledger
        channel: Channel[Callable[[], None]] = Channel(
            lambda: channel.serve(lambda run: run()),
            name="iobench-export",
            limit=_NO_LIMIT,
            lingers=False,
            daemon=False,
        )
        self._channel = channel

    def begin(
        self, step: int, save: Save | None, source: str | Path, out: str | Path, **options: Any
    ) -> None:
        """Export the checkpoint `step` at `source` when `save` is committed; keep it until then."""
        self._ledger.hold(step)
        self._channel.submit(Lease(partial(self._export, step, save, source, out, options)))

    def _export(
        self,
        step: int,
        save: Save | None,
        source: str | Path,
        out: str | Path,
        options: dict[str, Any],
    ) -> None:
        from iobench.exports.export import export  # here: it takes time to import

        try:
            if save is not None and save.wait() and save.status != "committed":
                raise UsageError(f"step {step} is {save.status}, so it is not exported")
            export(source, out, world="alone", **options)
        except BaseException as error:  # noqa: BLE001 -- raised in the trainer's thread
            self._persister.fail_export(step, error)
        finally:
            self._ledger.release(step)

    def finish(self) -> None:
        """Wait for all exports; the persister raises what failed."""
        self._channel.drain(despite_failure=True)
