"""HeldPins: the pins of an optimizer that checkpoints of a Checkpointer name in their manifests."""

from __future__ import annotations

import contextlib
import io
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
import xxhash

from iobench import linux
from iobench.checkpoint.manifest import FileRecord, Manifest, Piece
from iobench.checkpoint.pinned_state import FoundPin, PinnedGeneration
from iobench.errors import DataMismatchError, TransferError, UsageError, transfer_errors
from iobench.offload.exported import ExportedFiles, ExportedState, SlotsFile
from iobench.offload.files import read_layout
from iobench.offload.groups import kept_values, kind_of, specs_of
from iobench.offload.layout import ParameterSpec, StateLayout
from iobench.offload.old_state import Own, replace_state
from iobench.offload.ranges import ParameterRange
from iobench.offload.record import GenerationRecord, Pin
from iobench.offload.record_areas import read_records
from iobench.offload.restore import HeldPin
from iobench.offload.store import GenerationStore
from iobench.regular_file import read_regular
from iobench.tiers.source_file import LocalDamageError
from iobench.writers.base import Writer
from iobench.writers.image import FileImage

if TYPE_CHECKING:
    from iobench.offload.engine import Engine
    from iobench.offload.optimizer import OffloadedOptimizer

__all__ = ["HeldPins", "check_free", "found_pins", "open_slots"]

_LOOK_AGAIN_S = 0.005
_RECORDS = "records"


class HeldPins:
    """Pins that stay until they are released. A PinnedState.

    Only `durable` may be called by another thread than the trainer's. It reads the file of the
    records: an engine in a process of its own answers the trainer only.
    """

    ranks = 1

    def __init__(self, optimizer: OffloadedOptimizer, files: ExportedFiles | None = None) -> None:
        """`files` are the names of this part in a remote tier."""
        self._optimizer, self._files = optimizer, files or ExportedFiles()
        self.directory, *_ = optimizer._attached
        self._layout = optimizer._running().layout

    def close_failed(self) -> None:
        """Close the optimizer, whose engine may have failed for the error that is being raised."""
        with contextlib.suppress(TransferError):
            self._optimizer.close()

    def reopen(self) -> None:
        """Open the optimizer if it is closed, for work that replaces all of its state."""
        optimizer = self._optimizer
        if self.closed:
            directory, options, kind, overlap = optimizer._attached
            store = GenerationStore.open(directory)
            store.withdraw()
            optimizer._attach(store, options, kind, overlap)

    @property
    def most(self) -> int:
        """How many pins there can be."""
        return self._layout.pins

    def found(self) -> list[FoundPin]:
        """Wait until all is durable, and return the held pins, the oldest first."""
        self.wait()
        found = found_pins(self.directory, read_records(self.directory, self._layout))
        self._optimizer._held.update(pin.name for pin in found)
        return found

    def hold(self, step: int, owner: str) -> str:
        """Pin the state after the last step; return the name of the pin. Waits for nothing.

        Raises UsageError before the first step and when all pins are held, TransferError after a
        failure.
        """
        optimizer = self._optimizer
        engine = optimizer._settled()
        if len(optimizer._held) >= self.most:
            raise UsageError(f"all pins={self.most} belong to checkpoints of a Checkpointer")
        file = io.BytesIO()
        # The random part makes the XXH3 the name of this pin alone.
        torch.save({"checkpointer": owner, "step": step, "name": secrets.token_hex(16)}, file)
        extra = file.getvalue()
        engine.pin(step, extra, kept_values(optimizer.param_groups), held=True)
        name: str = xxhash.xxh3_64_hexdigest(extra)
        optimizer._held.add(name)
        return name

    def release(self, names: Collection[str]) -> None:
        """Release pins, after all that was asked for before. Waits for nothing.

        A closed optimizer keeps them until the next one is used by a Checkpointer.
        """
        if not self.closed:
            self._optimizer._settled().unpin(sorted(names))
            self._optimizer._held.difference_update(names)

    @property
    def closed(self) -> bool:
        """Whether the optimizer is closed."""
        return self._optimizer._engine is None

    def wait(self) -> None:
        """Wait until all steps and pins are durable. Raises TransferError after a failure."""
        if not self.closed:
            self._optimizer._settled().wait()

    def durable(self, name: str) -> PinnedGeneration:
        """Wait until the pin is durable. For any thread.

        Raises TransferError when the engine ends before.
        """
        while True:
            engine = self._optimizer._engine
            ended = engine is None or engine.ended  # first: what it finished is seen below
            found = self._look(name)
            if found is not None:
                # The record may be seen before the engine's own sync of it returns.
                with transfer_errors("syncing", self.directory / _RECORDS):
                    linux.sync_file(self.directory / _RECORDS)
                return PinnedGeneration(
                    directory=str(self.directory),
                    pin=name,
                    generation=found.generation,
                    updates=found.updates,
                )
            if ended:
                raise TransferError(
                    f"{self.directory}: the offload engine ended before the generation was durable"
                )
            time.sleep(_LOOK_AGAIN_S)

    def _look(self, name: str) -> GenerationRecord | None:
        return _pinned_record(read_records(self.directory, self._layout), name)

    def restore(self, pinned: Sequence[PinnedGeneration]) -> None:
        """Let the training go on from this generation; fill the parameters.

        Reads nothing when `resume` has just taken it. Raises DataMismatchError when it is damaged
        or not there; the optimizer is closed then.
        """
        if len(pinned) != 1:
            raise DataMismatchError(
                f"{pinned[0].directory}: its optimizer was sharded over {len(pinned)} ranks; load "
                "it with offload=ShardedAdamW.resume(parameters, directory)"
            )
        self.restore_part(pinned[0])

    def restore_part(self, pinned: PinnedGeneration) -> None:
        """Restore the part of one rank; see `restore`."""
        optimizer = self._optimizer
        restored = optimizer.restored
        if (
            not self.closed
            and restored is not None
            and (restored.generation, restored.updates) == (pinned.generation, optimizer.updates)
            and optimizer._versions == [one._version for one in optimizer._parameters()]
        ):
            return
        directory, options, kind, overlap = optimizer._attached
        optimizer.close()
        optimizer._continue(directory, HeldPin(pinned.pin), options, kind, overlap)

    def abandon_later(self) -> None:
        """Abandon the generations after the one that was restored; durable on return."""
        with self._optimizer._running().local() as engine:
            base = engine.store.base
            if base is not None and base is not engine.store.newest:
                engine.store.adopt(base)

    def confirm(self) -> None:
        """Let a tentative generation count, because all ranks have it; durable on return."""
        with self._optimizer._running().local() as engine:
            newest = engine.store.newest
            if newest is not None and newest.tentative:
                engine.store.adopt(newest)

    def export(self, pinned: PinnedGeneration) -> tuple[PinnedGeneration, FileImage]:
        """Return `pinned` with its files for a remote tier, and the file that describes them."""
        record = self._look(pinned.pin)
        if record is None:
            raise TransferError(f"{self.directory}: that generation is not pinned any more")
        files = (self._files.record(self._layout, record),)
        described = self._files.described(self._layout, record)
        return msgspec.structs.replace(pinned, files=files), described

    def open_file(self, pinned: PinnedGeneration, record: FileRecord) -> SlotsFile:
        """Open the file of a pinned generation that a remote tier gets. Raises LocalDamageError."""
        return open_slots(self.directory, pinned, record)

    def restore_files(self, manifest: Manifest, location: str | Path, writer: Writer) -> None:
        """Go on from the files of a checkpoint at `location`, of any number of ranks; fill the
        parameters.

        They become the newest generation here, durable on return. Reads and compares all of the
        state. Raises DataMismatchError for damage, StateMismatchError for another model, UsageError
        for another optimizer, TransferError. The optimizer is closed then.
        """
        parts = ExportedState.parts(manifest, location, writer)
        specs = specs_of(self._optimizer.param_groups)
        if len(parts) == 1:
            parts[0].check_same(specs)
        parameters = self._optimizer._parameters()
        own = [(ParameterRange(i, 0, p.numel()), p) for i, p in enumerate(parameters)]
        self.replace(parts, specs, own)

    def replace(
        self,
        parts: Sequence[ExportedState],
        specs: Sequence[ParameterSpec],
        own: Own,
        history: str = "",
    ) -> None:
        """Write the state of `parts` as the next generation, and to the parameters; see
        `replace_state`. With a `history` it is that of all ranks, and tentative.

        Raises what `restore_files` raises. The optimizer is closed then.
        """
        optimizer = self._optimizer
        if (kind := kind_of(parts[0].groups[0])) != optimizer._kind:
            raise UsageError(f"{parts[0].where} has the state of {kind}, not of {optimizer._kind}")
        self.reopen()
        try:
            if history:
                optimizer._begin_history(history)
            optimizer.restored = None  # another state is here
            replace_state(optimizer, parts, specs, own, tentative=bool(history))
        except BaseException:
            self.close_failed()
            raise

    def remove_others(self, unused: Callable[[FoundPin], bool]) -> None:
        """One process leaves nothing of others."""


def check_free(held: Collection[str], engine: Engine) -> None:
    """Raise UsageError when no pin is left for one that is not held."""
    if max(len(held), engine.progress().held) >= engine.layout.pins:
        raise UsageError(f"all pins={engine.layout.pins} belong to checkpoints of a Checkpointer")


def open_slots(directory: Path, pinned: PinnedGeneration, record: FileRecord) -> SlotsFile:
    """Open the file `record` of a generation that is pinned in `directory`, for a remote tier.

    For any thread. Raises LocalDamageError when the generation is gone or damaged.
    """
    try:
        layout = read_layout(directory)
        found = _pinned_record(read_records(directory, layout), pinned.pin)
    except (TransferError, DataMismatchError, UsageError) as error:
        raise LocalDamageError(str(error)) from error
    same = found and not found.damaged and _pieces(layout, found) == record.pieces
    if found is None or not same:
        raise LocalDamageError(
            f"{directory}: the generation of pin {pinned.pin} is gone, or damaged"
        )
    return SlotsFile(directory, layout, found, record.path)


def _pieces(layout: StateLayout, record: GenerationRecord) -> tuple[Piece, ...]:
    return ExportedFiles().record(layout, record).pieces


def _pinned_record(records: Sequence[GenerationRecord], name: str) -> GenerationRecord | None:
    for pin in records[0].pins if records else ():
        if pin.extra == name:
            return next((r for r in records if r.generation == pin.generation), None)
    return None


def found_pins(directory: Path, records: Sequence[GenerationRecord]) -> list[FoundPin]:
    """Return the held pins of the newest of `records` of `directory`, the oldest first."""
    return [
        FoundPin(name=pin.extra, step=pin.step, owner=_owner(directory, pin))
        for pin in (records[0].pins if records else ())
        if pin.held and pin.extra
    ]


def _owner(directory: Path, pin: Pin) -> str | None:
    try:
        data = read_regular(directory / f"extra-{pin.extra}")
        return str(torch.load(io.BytesIO(data), weights_only=True)["checkpointer"])
    except Exception:  # noqa: BLE001 -- damaged: it stays, and a load of it says so
        return None
