"""HeldPins: the pins of an optimizer that checkpoints of a Checkpointer name in their manifests."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Collection
from pathlib import Path

import msgspec
import xxhash

from iobench import linux
from iobench.checkpoint.manifest import FileRecord, Manifest, PinnedGeneration
from iobench.errors import (
    DataMismatchError,
    StateMismatchError,
    TransferError,
    UsageError,
    transfer_errors,
)
from iobench.offload.exported import ExportedState, SlotsFile, description_of, file_of
from iobench.offload.files import read_layout
from iobench.offload.groups import kind_of, put_values, specs_of
from iobench.offload.record import RECORDS, GenerationRecord, Pin, read_records, record_of_pin
from iobench.offload.restore import HeldPin
from iobench.offload.state import OptimizerState
from iobench.remote.source_file import LocalDamageError
from iobench.writers.base import Writer
from iobench.writers.image import FileImage

__all__ = ["HeldPins"]


class HeldPins:
    """Pins that stay until they are released. A PinnedFiles.

    `durable`, `export` and `open_file` may be called by any thread, the rest by the trainer's.
    """

    def __init__(self, state: OptimizerState) -> None:
        self.state, self.most = state, state.running().layout.pins
        self._layout = state.running().layout

    def found(self, owner: str) -> list[tuple[Pin, bool]]:
        """Wait until all is durable; return the held pins, the oldest first, and whether each is
        that of `owner`."""
        self.wait()
        held = [one for one in self.state.running().store.pins if one.name]
        self.state.held.update(one.name for one in held)
        return [(one, one.owner == _digest(owner)) for one in held]

    def hold(self, step: int, owner: str) -> str:
        """Pin the state after the last step; return the name of the pin. Waits for nothing.

        Raises UsageError before the first step and when all pins are held, TransferError after a
        failure.
        """
        name = secrets.token_hex(8)
        self.state.pin(Pin(step, name, _digest(owner)))
        return name

    def release(self, names: Collection[str]) -> None:
        """Release pins, after all that was asked for before. Waits for nothing.

        A closed optimizer keeps them until the next one is used by a Checkpointer.
        """
        if not self.state.closed:
            self.state.settled().unpin(sorted(names))
            self.state.held.difference_update(names)

    def wait(self) -> None:
        """Wait until all steps and pins are durable. Raises TransferError after a failure."""
        if not self.state.closed:
            self.state.settled().wait()

    def durable(self, name: str) -> PinnedGeneration:
        """Wait until the pin is durable. Raises TransferError when the engine ends before."""
        record = self._record(name)
        if record is None:
            raise TransferError(
                f"{self.state.directory}: the offload engine ended before the generation was "
                "durable"
            )
        return PinnedGeneration(
            directory=str(self.state.directory),
            pin=name,
            generation=record.generation,
            updates=record.updates,
        )

    def _record(self, name: str) -> GenerationRecord | None:
        """Wait until the pin is durable or the engine has ended; return its record."""
        engine = self.state.engine
        found = None if engine is None else engine.wait_for_pin(name)
        if found is None:  # the optimizer is closed: what became durable before is in its files
            path = self.state.directory / RECORDS
            with transfer_errors("syncing", path):  # a sync that failed may have been the last
                linux.sync_file(path)
            records = read_records(self.state.directory, self._layout)
            found = _pinned_record(records, name)
        return found

    def export(self, pinned: PinnedGeneration) -> tuple[PinnedGeneration, FileImage]:
        """Return `pinned` with its files for a remote tier, and the file that describes them."""
        record = self._record(pinned.pin)
        if record is None:
            raise TransferError(f"{self.state.directory}: that generation is not pinned any more")
        files = (file_of(self._layout, record),)
        described = description_of(self._layout, record)
        return msgspec.structs.replace(pinned, files=files), described

    def open_file(self, pinned: PinnedGeneration, record: FileRecord) -> SlotsFile:
        """Open the file `record` of a pinned generation, for a remote tier.

        Raises LocalDamageError when the generation is gone or damaged.
        """
        directory = self.state.directory
        try:
            layout = read_layout(directory)
            found = _pinned_record(read_records(directory, layout), pinned.pin)
        except (TransferError, DataMismatchError, UsageError) as error:
            raise LocalDamageError(str(error)) from error
        if found is None or found.damaged or file_of(layout, found) != record:
            raise LocalDamageError(
                f"{directory}: the generation of pin {pinned.pin} is gone, or damaged"
            )
        return SlotsFile(directory, layout, found)

    def _is_here(self, pinned: PinnedGeneration) -> bool:
        """Whether `resume` has just taken this generation."""
        state, taken = self.state, self.state.restored
        if state.closed or taken is None:
            return False
        now = state.settled().updates
        same = (taken.generation, taken.updates) == (pinned.generation, now)
        return same and state.untouched

    def restore(self, pinned: PinnedGeneration) -> None:
        """Let the training go on from this generation; fill the parameters.

        Reads nothing when `resume` has just taken it. Raises DataMismatchError when it is damaged
        or not there; the optimizer is closed then.
        """
        if not self._is_here(pinned):
            self.state.close()
            self.state.resume(HeldPin(pinned.pin))

    def restore_files(self, manifest: Manifest, location: str | Path, writer: Writer) -> None:
        """Go on from the files of a checkpoint at `location`; fill the parameters.

        They become the newest generation here, durable on return. Reads and compares all of the
        state. Raises DataMismatchError for damage, StateMismatchError for another model, UsageError
        for another optimizer, TransferError. The optimizer is closed then.
        """
        state, source = self.state, ExportedState(manifest, location, writer)
        source.layout.check_same(specs_of(state.groups), source.where)
        if len(source.groups) != len(state.groups):
            counts = f"{len(state.groups)} of them", f"{len(source.groups)} of them"
            raise StateMismatchError(source.where, misshaped={"parameter groups": counts})
        if (kind := kind_of(source.groups[0])) != state.kind:
            raise UsageError(f"{source.where} has the state of {kind}, not of {state.kind}")
        state.reopen()
        try:
            put_values(state.groups, source.groups)
            state.replace(source, source.updates)
        except BaseException:
            with contextlib.suppress(TransferError):  # of the error that is being raised
                state.close()
            raise


def _digest(owner: str) -> str:
    return xxhash.xxh3_64_hexdigest(owner.encode(errors="surrogateescape"))


def _pinned_record(records: list[GenerationRecord], name: str) -> GenerationRecord | None:
    for pin in records[0].pins if records else ():
        if pin.name == name:
            return record_of_pin(records, pin)
    return None
