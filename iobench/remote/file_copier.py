"""FileCopier: copies checkpoints to the remote tier, and reads them back, with all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from iobench.checkpoint.manifest import MANIFEST, FileRecord, Manifest, PinnedGeneration
from iobench.checkpoint.ranked.plan import data_file
from iobench.checkpoint.rate_limit import RateLimit, StoppedError
from iobench.checkpoint.store import DirectoryStore
from iobench.errors import DataMismatchError, TransferError, transfer_errors
from iobench.ranks.control import Control
from iobench.regular_file import read_regular
from iobench.remote.queue import NOT_DURABLE, DrainQueue, Queued
from iobench.remote.remote import RemoteTier
from iobench.remote.source_file import BLOCK_BYTES, LocalDamageError, PinnedFiles, SourceFile
from iobench.writers.base import Source


def read_back(
    files: Iterable[FileRecord],
    location: str | Path,
    open_source: Callable[[str], Source],
    wait: Callable[[int], None],
) -> None:
    """Read these files of the checkpoint in `location` and compare each piece with its checksum.

    Memory of one block is enough. `wait` is called with the bytes of each block. Raises
    DataMismatchError that names the file and the piece, and TransferError.
    """
    for record in files:
        where = os.path.join(location, record.path)
        with transfer_errors("reading back", where), closing(open_source(where)) as source:
            blocks = iter(partial(source.read, BLOCK_BYTES), b"")
            compare_file(record, map(memoryview, blocks), where, wait)


def compare_file(
    record: FileRecord, blocks: Iterator[memoryview], where: str, wait: Callable[[int], None]
) -> None:
    """Compare the pieces of one file with its bytes. Raises DataMismatchError."""
    rest = memoryview(b"")
    for piece in record.pieces:
        digest, left = xxhash.xxh3_64(), piece.size_bytes
        while left:
            if not rest:
                rest = next(blocks, rest)
                if not rest:
                    raise DataMismatchError(f"{where}: its manifest has more bytes than the file")
                wait(len(rest))
            digest.update(rest[:left])
            rest, left = rest[left:], max(0, left - len(rest))
        if digest.hexdigest() != piece.xxh3_64:
            raise DataMismatchError(
                f"{where}: damaged, the checksum of {piece.name or 'the header'} differs"
            )
    if rest or next(blocks, None) is not None:
        raise DataMismatchError(f"{where}: has bytes that its manifest does not name")


_KINDS = (LocalDamageError, StoppedError, DataMismatchError, TransferError)
"""Errors by the number that rank 0 gets. The lowest one counts if several ranks fail."""


@dataclass(kw_only=True)
class FileCopier:
    """Copies checkpoints from `local` to `remote` within a rate limit; every rank moves a share.

    So the rate grows with the number of nodes. `copy`, `verify` and `tell` are for the thread of
    rank 0; the queue says what the state of a checkpoint is. The others do in a thread of their own
    what it asks for: `next`, `done` and `answer`. An error of one rank is an error of the whole
    call. RankError means that a rank is lost, and that no call works any more.
    """

    local: DirectoryStore
    remote: RemoteTier
    queue: DrainQueue
    limit: RateLimit
    control: Control
    offload: PinnedFiles | None = None
    """The state that has the pinned generations of checkpoints."""
    _told: dict[int, Queued] = field(default_factory=dict)

    # Rank 0.

    def copy(self, entry: Queued) -> int | None:
        """Copy a checkpoint. It is durable in the remote tier on return; the state says so.

        Returns the bytes sent by this attempt; None if its step was removed or saved anew
        meanwhile, or the copy was given up. Raises LocalDamageError, TransferError, StoppedError.
        """
        if not self.queue.move(entry, "draining", of=NOT_DURABLE):
            return None
        self.limit.begin()
        found = self._manifest(entry)
        if found is None:
            return None
        manifest, text = found
        place = self.remote.place(entry.step)
        copy = self.remote.copy(place, entry.serial, self.limit)
        order = {"do": "send", "step": entry.step, "serial": entry.serial, "place": str(place)}
        sent = self._together(order, manifest.files, manifest.pinned)
        for part in shares(manifest.files, self.control.world.size)[1:]:
            for file in part:
                copy.check(file.path, file.size_bytes)
        with self.remote.alone:  # no direct save of this step is written or begins meanwhile
            # A copy that was given up on the way may have bytes of a later generation of the
            # optimizer: its pin is free then. One that is given up from here on is right, and may
            # replace what retention drops.
            if not self.queue.has(entry, ["draining"]):
                return None
            copy.publish(text)
            self.remote.published(manifest, [one.step for one in self.queue.not_durable()])
            if not self.queue.move(entry, "durable", of=["draining"]):
                if not self.queue.has(entry, ["dropped"]):  # removed or saved anew
                    self.remote.remove(entry.step)
                return None
        return sent

    def verify(self, entry: Queued) -> bool:
        """Read the remote copy back. False: it is no longer there, or was given up meanwhile.

        Raises LocalDamageError when it is not right and the local files are not either: it stays,
        and a restore mends each of the two with pieces of the other one. Raises DataMismatchError
        when only the remote copy is wrong; it is removed, and will be sent again. Raises
        TransferError.
        """
        remote = self.remote
        self.limit.begin()
        if not remote.holds(entry.step):
            self.queue.move(entry, "dropped", of=["durable"])
            return False
        try:
            found = self._manifest(entry)
            manifest = found[0] if found else None
        except LocalDamageError:  # of the local copy alone
            manifest = remote.store.manifest(entry.step)
        if manifest is None or manifest.serial != entry.serial:
            self.queue.move(entry, "dropped", of=["durable"])
            return False
        try:
            where = str(remote.store.locate(entry.step))
            self._together({"do": "read back", "place": where}, manifest.remote_files)
        except DataMismatchError as error:
            try:
                order = {"do": "compare", "step": entry.step}
                self._together(order, manifest.files, manifest.pinned)
            except (DataMismatchError, OSError) as damage:
                raise LocalDamageError(str(damage)) from error
            with remote.alone:
                # False: it was a later save of this step, or the local files may be gone by now.
                if not self.queue.move(entry, "waiting", of=["durable"]):
                    return False
                remote.remove(entry.step)
            raise
        return self.queue.move(entry, "verified", of=["durable"])

    def _manifest(self, entry: Queued) -> tuple[Manifest, bytes] | None:
        """Return the local manifest and its text; None if it is that of a later save."""
        path = self.local.locate(entry.step) / MANIFEST
        try:
            text = read_regular(path)
            manifest = Manifest.parse(text, str(path))
        except (DataMismatchError, OSError) as error:
            raise LocalDamageError(str(error)) from error
        return (manifest, text) if manifest.serial == entry.serial else None

    def tell(self, entries: Sequence[Queued]) -> None:
        """Let the other ranks know the states of copies that have changed since the last call."""
        now = {one.step: one for one in entries}
        changed = [one for one in entries if self._told.get(one.step) != one]
        gone = [[one.step, one.serial] for one in self._told.values() if one.step not in now]
        if changed or gone:
            self._told.clear()
            self._told.update(now)
            order = {"do": "note", "states": msgspec.to_builtins(changed), "gone": gone}
            self._scatter([order] * self.control.world.size)

    def end(self) -> None:
        """Let the threads of the other ranks end."""
        self._scatter([{"do": "end"}] * self.control.world.size)

    def _together(
        self,
        order: dict[str, Any],
        files: Sequence[FileRecord],
        pinned: Sequence[PinnedGeneration] = (),
    ) -> int:
        """Let all ranks move their parts. Return the bytes sent; raise when all have ended."""
        own, *others = shares(files, self.control.world.size)
        if order["do"] == "send":  # 100,000 pieces are sent only where they are needed
            others = [[msgspec.structs.replace(one, pieces=()) for one in part] for part in others]
        self._scatter([order, *({**order, "files": msgspec.to_builtins(one)} for one in others)])
        failure: Exception | None = None
        try:
            answer: dict[str, Any] = {"sent": self.done(order, own, pinned)}
        except Exception as error:  # noqa: BLE001 -- raised below, when the others have ended
            failure, answer = error, {"error": shown_error(error)}
        every = self.answer(answer)
        failed = {rank: one for rank, one in enumerate(every) if "error" in one}
        if failure is not None and len(failed) == 1:
            raise failure
        if failed:
            kind = min(one["error"][0] for one in failed.values())
            texts = [
                f"rank {rank} (host {one['host']}): {one['error'][1]}"
                for rank, one in failed.items()
                if one["error"][0] == kind
            ]
            raise _KINDS[kind]("; ".join(texts)) from failure
        return sum(one["sent"] for one in every)

    def _scatter(self, orders: list[dict[str, Any]]) -> None:
        self.control.scatter("next copy", orders)

    # The other ranks.

    def next(self) -> dict[str, Any]:
        """Wait for the next order of rank 0. Raises RankError when a rank is lost."""
        found: dict[str, Any] = self.control.scatter("next copy")
        return found

    def answer(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """Tell rank 0 what became of its order. Return the answers of all ranks in rank 0."""
        answer = {"host": self.control.world.host, **answer}
        return self.control.gather("copied", answer)

    # All ranks.

    def done(
        self,
        order: Mapping[str, Any],
        files: Sequence[FileRecord],
        pinned: Sequence[PinnedGeneration] = (),
    ) -> int:
        """Do what rank 0 asks for with the files of this rank. Return the bytes sent."""
        if order["do"] == "read back":
            read_back(files, order["place"], self.remote.writer.open_source, self.limit.wait)
            return 0
        copy, sent = None, 0
        if order["do"] == "send":
            copy = self.remote.copy(order["place"], order["serial"], self.limit)
        for where, file, opened in self._opened(order["step"], files, pinned):
            with opened as source:
                if copy is not None:
                    sent += copy.send(source)
                else:
                    blocks = (block.data for block in source.blocks())
                    compare_file(file, blocks, os.path.join(where, file.path), self.limit.wait)
        return sent

    def _opened(
        self, step: int, files: Sequence[FileRecord], pinned: Sequence[PinnedGeneration]
    ) -> Iterator[tuple[str | Path, FileRecord, SourceFile]]:
        """Open the local files one after another. Yield the directory, the record and the file."""
        directory = self.local.locate(step)
        for file in files:
            yield directory, file, SourceFile(directory, file.path, file.size_bytes)
        for one in pinned:
            if self.offload is None:
                raise LocalDamageError(f"{one.directory}: the optimizer is not open")
            for file in one.files:
                yield one.directory, file, self.offload.open_file(one, file)


def shares(files: Sequence[FileRecord], ranks: int) -> list[list[FileRecord]]:
    """Return the files of each rank: those that it saved itself, and of the others each n-th."""
    own = {data_file(rank): rank for rank in range(ranks)}
    found: list[list[FileRecord]] = [[] for _ in range(ranks)]
    for number, file in enumerate(files):
        found[own.get(file.path, number % ranks)].append(file)
    return found


def shown_error(error: Exception) -> tuple[int, str]:
    """Return the kind and the text of an error, for rank 0."""
    kind = next((kind for kind, one in enumerate(_KINDS) if isinstance(error, one)), None)
    return (len(_KINDS) - 1, repr(error)) if kind is None else (kind, str(error))
