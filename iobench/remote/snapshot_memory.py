"""SnapshotMemory: the memory tiers of a Checkpointer, what waits in them, and loads from them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from iobench import linux
from iobench.checkpoint.ledger import Ledger
from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.persister import Persister, Snapshot
from iobench.checkpoint.piece_reader import HeldFiles
from iobench.checkpoint.ranked.messages import Committed, Turns
from iobench.checkpoint.ranked.plan import data_file
from iobench.checkpoint.restore import Candidates, NearerCandidates
from iobench.checkpoint.retention import Retention
from iobench.checkpoint.save import Copy, Save
from iobench.checkpoint.store import CheckpointStore, DirectoryStore
from iobench.errors import DataMismatchError, TransferError
from iobench.ranks.world import World
from iobench.remote.local_tier import LocalTier
from iobench.remote.memory import Kept, Memory, MemoryPool, MemorySlot, MemoryTier
from iobench.remote.tiered_store import MendedReader
from iobench.units import MIB
from iobench.writers.base import CopyReader, ImageSource, Source
from iobench.writers.blocks.channel import Lease
from iobench.writers.blocks.pages import make_pages
from iobench.writers.blocks.workers import Blocks, run_workers
from iobench.writers.image import Bytes, FileImage, Ranges
from iobench.writers.transfer import Meter, Transfer

_BLOCK = 4 * MIB  # the checksum that follows finds it in the cache of the CPU
_MOST_THREADS = 8


class SnapshotMemory:
    """Wires memory tiers to the Checkpointer of one rank of `world`. `open` comes first.

    Every snapshot waits in memory until it is written, or until retention would not keep it.
    Each process of a node has an equal share of the `memories`. Raises OptionError or
    UnavailableError for memory that cannot be had here.
    """

    def __init__(self, memories: Sequence[Memory], world: World) -> None:
        tiers = [MemoryTier(one, sharers=world.local_size) for one in memories]
        self.pool = MemoryPool(tiers, sharers=world.local_size, alone=world.size == 1)

    def open(
        self,
        persist: Callable[[Snapshot], Committed],
        *,
        ledger: Ledger | None,
        keep: Retention,
        store: CheckpointStore,
        in_order: bool,
        newest_first: bool,
        turns: Turns | None = None,
    ) -> Persister:
        """Return the persister. `ledger` is that of rank 0; `keep` is the user's.

        With `in_order` every snapshot is written, the oldest first. Otherwise those that retention
        drops are not; `newest_first` is for the others.
        """
        self._newest_first = newest_first
        self._ledger, self._keep, self._store = ledger, keep, store
        self._local = store if isinstance(store, LocalTier) else None

        def kept(snapshot: Snapshot) -> None:
            found = persist(snapshot)
            if isinstance(snapshot.slot, MemorySlot):
                snapshot.slot.kept = _kept(snapshot, found)

        return Persister(self.pool, kept, pick=None if in_order else self._pick, turns=turns)

    def _pick(self, waiting: list[Lease[Snapshot]]) -> list[Lease[Snapshot]]:
        """Write the oldest snapshot next, or the newest one if the trainer drops old ones.

        One that retention would remove at once, as newer ones wait or are durable, is dropped.
        """
        assert self._ledger is not None  # this is rank 0
        saves = [lease.item.save for lease in waiting]
        try:
            wanted = self._wanted(
                {save.step: (self._ledger.serial_of(save), save.created_s) for save in saves}
            )
        except TransferError:  # the manifests cannot be read: the commit of this one tells it
            return waiting
        wanted.add(saves[-1].step)
        stay = [lease for lease in waiting if lease.item.save.step in wanted]
        return [stay[-1], *stay[:-1]] if self._newest_first else stay

    def _wanted(self, waiting: Mapping[int, tuple[int, float]]) -> set[int]:
        """Return the steps that the local or remote tier would keep.

        `waiting` has serial numbers and times by step.
        """
        assert self._ledger is not None  # this is rank 0
        wanted = self._ledger.would_keep(waiting, self._keep)
        if self._local is not None:
            wanted |= self._local.remote.would_keep(waiting)
        return wanted

    def began(self, save: Save) -> None:
        """Number a save: it may be written after later ones."""
        save.tiers = self.copies
        if self._ledger is not None:
            save.serial = self._ledger.new_serial()

    def copies(self, save: Save) -> list[Copy]:
        """Return where the copies of `save` are, nearest first, as far as this rank knows."""
        slots = (one for one in self.pool.slots() if one.save is save and (one.busy or one.kept))
        memory = [Copy(tier=one.tier, state="volatile") for one in slots][:1]
        if save.status != "committed":
            return memory
        if self._local is not None:
            return [*memory, *self._local.copies(save)]
        durable = self._is_stored(save)
        return [*memory, *([Copy(tier=str(self._store), state="durable")] if durable else [])]

    def _is_stored(self, save: Save) -> bool:
        if self._ledger is not None:
            return self._ledger.serials().get(save.step) == save.serial
        if isinstance(self._store, DirectoryStore):
            return os.path.exists(self._store.locate(save.step))
        return True  # a bucket is not asked

    def kept(self, step: int, serial: int) -> MemorySlot | None:
        """Return the slot with the bytes of this committed checkpoint, if memory still has it."""
        for slot in self.pool.slots():
            kept = slot.kept
            if kept and (kept.step, kept.serial) == (step, serial):
                return slot
        return None

    def committed(self, listed: Mapping[int, int]) -> list[tuple[int, int]]:
        """Return the steps and serial numbers of checkpoints whose bytes this rank has in memory.

        In rank 0 without those that were removed or replaced; `listed` are the serial numbers of
        what is stored.
        """
        found = [(slot.kept.step, slot.kept.serial) for slot in self.pool.slots() if slot.kept]
        if self._ledger is None:
            return found
        known = self._ledger.serials()
        if self._local is not None:  # saves that went to the remote tier directly
            known |= {one.step: one.serial for one in self._local.drain.queue.entries()}
        known |= listed
        return [(step, serial) for step, serial in found if known.get(step) == serial]

    def forget(self, step: int) -> None:
        """Drop the bytes of a checkpoint that was removed."""
        for slot in self.pool.slots():
            if slot.kept is not None and slot.kept.step == step:
                slot.kept = None


class MemoryCandidates(NearerCandidates):
    """`inner`, with the copies of steps that are in memory: `slots` by step.

    In a job of several ranks each rank has its own file there, and the others come from `inner`.
    What memory has damaged comes from there too, piece by piece.
    """

    def __init__(self, inner: Candidates, slots: Mapping[int, MemorySlot], *, ranks: int) -> None:
        super().__init__(inner)
        self._slots, self._ranks = slots, ranks
        self._kept = {step: slot.kept for step, slot in slots.items() if slot.kept}
        self._problems: dict[int, tuple[str, str]] = {}  # tier of a copy that is left, and why
        self._read: dict[int, MendedReader] = {}

    def held(self, step: int) -> HeldFiles | None:
        if step not in self._kept:
            return super().held(step)
        slot = self._slots[step]
        if slot.kept is None or slot.kept.manifest is not None:
            return None  # of one rank, which reads it like a file
        images = {image.path: image for image in slot.kept.files(slot.memory)}
        return HeldFiles(images, {data_file(rank): [rank] for rank in range(self._ranks)})

    def _whole(self) -> dict[int, Manifest]:
        """Return the manifests of checkpoints of which memory has all files."""
        return {step: one.manifest for step, one in self._kept.items() if one.manifest}

    def steps(self) -> list[int]:
        return sorted({*super().steps(), *self._whole()})

    def serials(self) -> dict[int, int]:
        return super().serials() | {step: one.serial for step, one in self._whole().items()}

    def manifest(self, step: int, *, files: bool = True) -> Manifest:
        return self._whole().get(step) or super().manifest(step, files=files)

    def locate(self, step: int) -> str | Path:
        stored = step not in self._kept or step in super().steps()
        return super().locate(step) if stored else self._slots[step].tier

    def reader(self, step: int, manifest: Manifest) -> CopyReader:
        kept = self._kept.get(step)
        if kept is None:
            return super().reader(step, manifest)
        slot, inner = self._slots[step], self._inner

        def stored() -> CopyReader | None:
            slot.kept = None  # it is damaged
            same = step in inner.steps() and inner.manifest(step) == manifest
            return inner.reader(step, manifest) if same else None

        others = None if kept.manifest else inner.reader(step, manifest)
        near = MemoryReader(kept.files(slot.memory), self.locate(step), others)
        self._read[step] = MendedReader(near, stored)
        return self._read[step]

    def next_copy(self, step: int, problem: str) -> bool:
        if self._kept.pop(step, None) is None:
            return super().next_copy(step, problem)
        slot = self._slots[step]
        self._problems[step], slot.kept = (slot.tier, problem), None
        return step in super().steps()

    def sources(self, step: int) -> dict[str, str]:
        if step in self._kept:
            return self._read[step].sources(step, self._slots[step].tier, str(self))
        stored = super().sources(step) or {str(self): "read"}
        if step not in self._problems:
            return stored
        tier, problem = self._problems[step]
        message = f"step {step} is not read from {tier}: {problem}"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
        return {tier: problem, **stored}


class MemoryReader:
    """The copy of a checkpoint whose files are the images `files`; further ones are `others`."""

    name = "memory"

    def __init__(
        self, files: Iterable[FileImage], location: str | Path, others: CopyReader | None
    ) -> None:
        self.location, self._others = location, others
        self._files = {image.path: image for image in files}

    def open_source(self, target: str) -> Source:
        name = os.path.basename(target)
        if self._others is not None and name not in self._files:
            return self._others.open_source(target)
        return ImageSource(self._files[name])

    def read_again(self, image: FileImage, start: int, stop: int, piece: str) -> bool:
        del image, start, stop, piece
        return False

    def read(self, image: FileImage, ranges: Ranges | None = None) -> Transfer:
        """Copy these ranges of the file. Raises DataMismatchError for another size."""
        if self._others is not None and image.path not in self._files:
            return self._others.read(image, ranges)
        source, meter = self._files[image.path], Meter()
        if source.size_bytes != image.size_bytes:
            raise DataMismatchError(
                f"{os.path.join(self.location, image.path)}: has {image.size_bytes} bytes, and "
                f"{source.size_bytes} in memory"
            )

        def work(blocks: Blocks, _: Meter) -> None:
            for start, stop in blocks:
                for view in image.views(start, stop):
                    if view.ctypes.data % linux.PAGE == 0:  # by one call: half the time of faults
                        make_pages(view)
                position = start
                for view in source.views(start, stop):
                    position += image.scatter(position, position + len(view), view)
                image.filled(start, stop)

        ranges = [(0, image.size_bytes)] if ranges is None else ranges
        threads = min(_MOST_THREADS, os.cpu_count() or 1)
        run_workers(threads, Blocks(ranges, _BLOCK), work, meter)
        size = sum(stop - start for start, stop in ranges)
        return meter.transfer(self.name, "read", size, durable=False)


def _kept(snapshot: Snapshot, found: Committed) -> Kept:
    """Return what the slot has of the checkpoint: all of its files, or the file of this rank."""
    content = snapshot.content
    if found.manifest is not None:
        return Kept(
            step=snapshot.save.step,
            serial=found.serial,
            manifest=found.manifest,
            files=lambda memory: [content.image_in(memory), content.skeleton_image()],
        )
    path, size = found.file.path, content.size_bytes
    end = [bytes(view) for view in found.file.views(size, found.file.size_bytes)]

    def files(memory: Bytes) -> list[FileImage]:
        return [FileImage.of(path, [memory[:size], *end])]

    return Kept(step=snapshot.save.step, serial=found.serial, files=files)
