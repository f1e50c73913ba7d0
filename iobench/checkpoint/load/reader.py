"""PieceReader: delivers the pieces of a checkpoint that a rank needs, once each is compared."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import xxhash

from iobench import linux
from iobench.checkpoint.load.stored import StoredPiece
from iobench.checkpoint.manifest import FileRecord
from iobench.environment.memory import host_takes_free_memory
from iobench.errors import DataMismatchError
from iobench.ranks.control import Control
from iobench.ranks.progress import Progress, WatchedImage
from iobench.ranks.restore_mode import OtherRankError, Reader
from iobench.ranks.restore_plan import RestoreMode
from iobench.ranks.slices import Range
from iobench.ranks.transport import Transport
from iobench.units import MIB
from iobench.writers.base import Writer
from iobench.writers.blocks.pages import fresh_pages
from iobench.writers.image import Bytes, FileImage
from iobench.writers.transfer import Meter, Transfer

__all__ = ["Deliver", "PieceReader", "SharedReads", "piece_reader"]

_AT_ONCE = 512 * MIB
_GAP = MIB  # smaller gaps between two pieces are read, not skipped

Deliver = Callable[[StoredPiece, Bytes], bool]
"""Takes the bytes of a piece, whose checksum is right, in a thread of the reader.

Returns whether the bytes are needed after the call. Then they stay in this memory."""


@dataclass(frozen=True, kw_only=True)
class SharedReads:
    """How the ranks of a job read together: the restore mode, and the calls of all ranks.

    `owners`: the rank that reads each file, in place of a choice by the restore mode.
    """

    reader: Reader
    control: Control
    deadline_s: float
    owners: Mapping[str, int] | None = None


class PieceReader:
    """Reads the pieces that this rank needs. For one load.

    By itself through `writer`, or `together` with the other ranks, which all make the same calls.
    Each rank compares every piece with its checksum, whether it came from storage or from another
    rank, in a thread of its own while the next ones arrive. Up to two windows of 512 MiB of pieces
    are in memory at once; ranks that need the same pieces need them in the same order.
    """

    def __init__(self, writer: Writer, together: SharedReads | None = None) -> None:
        self._writer, self._together = writer, together
        self._begun = False

    def read(
        self,
        location: str | Path,
        files: Mapping[str, FileRecord],
        pieces: Iterable[StoredPiece],
        deliver: Deliver,
    ) -> Transfer:
        """Deliver each of `pieces` once, in any order, after its checksum was compared.

        Raises DataMismatchError for a piece with another checksum and for a file of another size,
        and TransferError. A failure of another rank raises DataMismatchError too: the load fails in
        all ranks alike.
        """
        windows = list(_windows(pieces))
        self._begun = True
        counts = self._agree("pieces", {"windows": len(windows)})
        numbers = {path: number for number, path in enumerate(sorted(files))}
        last = _Window()
        transfers = []
        with _Check(self._writer, location, deliver) as check:
            for at in range(max(int(one["windows"]) for one in counts)):
                wanted = windows[at] if at < len(windows) else {}
                window, images, ranges = self._prepared(wanted, last, files, numbers, check)
                transfers.append(self._fetch(location, images, ranges, numbers))
                self._finish(last, check)
                last = window
            self._finish(last, check)
        if not transfers:
            transfers.append(self._fetch(location, {}, [], numbers))
        reader = None if self._together is None else self._together.reader
        if reader is None or not reader.distinct_bytes:
            return Transfer.total(transfers)
        whole = reader.storage_bytes / reader.distinct_bytes
        return replace(Transfer.total(transfers), read_amplification=whole)

    def finish(self) -> None:
        """Release the other ranks if this one failed before it read: they wait for it."""
        if not self._begun:
            self._tell("pieces", {"error": "it failed before it read"})

    def _prepared(
        self,
        wanted: Mapping[str, list[StoredPiece]],
        last: _Window,
        files: Mapping[str, FileRecord],
        numbers: Mapping[str, int],
        check: _Check,
    ) -> tuple[_Window, dict[int, FileImage], list[Range]]:
        """Return a window with its memory, the images to fill, and the ranges to read."""
        images: dict[int, FileImage] = {}
        ranges: list[Range] = []
        try:
            window = _Window(pieces=wanted)
            for path, pieces in wanted.items():
                memory = last.memory.get(path)
                if memory is None:
                    # Address space for the whole file. Pages take memory when they are filled, and
                    # are given up with the window.
                    size = files[path].size_bytes
                    memory = fresh_pages(size, huge=not host_takes_free_memory())
                window.memory[path] = memory
                image = FileImage.of(path, [memory])
                images[numbers[path]] = WatchedImage(image, check.watch(window, path))
                ranges += _ranges(numbers[path], pieces)
        except Exception as error:
            if self._together is not None:
                self._together.reader.refuse(error)  # the others wait for what this rank wants
            raise
        return window, images, ranges

    def _fetch(
        self,
        location: str | Path,
        images: Mapping[int, FileImage],
        wanted: Sequence[Range],
        numbers: Mapping[str, int],
    ) -> Transfer:
        if self._together is None:
            return self._read_alone(location, images, wanted)
        owners, named = None, self._together.owners
        if named is not None:
            owners = {numbers[at]: rank for at, rank in named.items() if at in numbers}
        try:
            return self._together.reader.read(images, str(location), wanted, owners)
        except OtherRankError as error:
            raise DataMismatchError(str(error)) from error

    def _read_alone(
        self, location: str | Path, images: Mapping[int, FileImage], wanted: Sequence[Range]
    ) -> Transfer:
        meter = Meter()
        for number, start, stop in wanted:
            done = self._writer.read(images[number], location, start=start, stop=stop)
            images[number].filled(start, stop)  # a writer need not report every range
            meter.add(done, done.phases_s)
        size = sum(part.size_bytes for part in wanted)
        return meter.transfer(self._writer.name, "read", size, durable=True, files=len(images))

    def _finish(self, window: _Window, check: _Check) -> None:
        """Wait until all pieces of a window are delivered, in all ranks; free what is not kept."""
        wrong = check.failure_of(window)
        self._agree("checked", {"error": None if wrong is None else str(wrong)}, wrong)
        window.free()

    def _agree(
        self, phase: str, value: dict[str, Any], error: BaseException | None = None
    ) -> list[Any]:
        """Return what all ranks told. Raises `error`, or DataMismatchError for that of others."""
        every = self._tell(phase, value)
        if error is not None:
            raise error
        failed = {rank: one["error"] for rank, one in enumerate(every) if one.get("error")}
        if failed:
            raise DataMismatchError("; ".join(f"rank {r}: {text}" for r, text in failed.items()))
        return every

    def _tell(self, phase: str, value: dict[str, Any]) -> list[Any]:
        ranks = self._together
        if ranks is None:
            return [value]
        return ranks.control.all_gather(phase, value, deadline_s=ranks.deadline_s)


@contextmanager
def piece_reader(
    control: Control,
    writer: Writer,
    mode: RestoreMode,
    *,
    deadline_s: float,
    owners: Mapping[str, int] | None = None,
) -> Iterator[Callable[[], PieceReader]]:
    """Provide what makes the reader of one checkpoint, by a restore mode.

    With `owners` the mode does not count: each file is read by its owner. The connections to the
    other ranks end with the block.
    """
    if mode == "all" and owners is None:
        yield lambda: PieceReader(writer)
        return
    with Transport(control) as transport:
        together = SharedReads(
            reader=Reader(writer, transport, mode, deadline_s=deadline_s),
            control=control.sub("load"),
            deadline_s=deadline_s,
            owners=owners,
        )
        yield lambda: PieceReader(writer, together)


@dataclass(kw_only=True, eq=False)
class _Window:
    """Pieces by file that are in memory at once, in file order; `left` did not arrive yet."""

    pieces: Mapping[str, list[StoredPiece]] = field(default_factory=dict)
    memory: dict[str, Bytes] = field(default_factory=dict)
    left: set[StoredPiece] = field(default_factory=set)
    kept: set[StoredPiece] = field(default_factory=set)

    def free(self) -> None:
        """Give up the pages of all pieces that are not kept, and of the gaps between them."""
        for path, pieces in self.pieces.items():
            base, done = self.memory[path].ctypes.data, pieces[0].start
            for piece in pieces:
                if piece in self.kept:
                    linux.give_up_pages(base + done, piece.start - done)
                    done = piece.stop
            linux.give_up_pages(base + done, pieces[-1].stop - done)


class _Check:
    """Compares pieces with their checksums and delivers them, in a thread, as they arrive."""

    def __init__(self, writer: Writer, location: str | Path, deliver: Deliver) -> None:
        self._writer, self._location, self._deliver = writer, location, deliver
        self._arrived: queue.SimpleQueue[tuple[_Window, StoredPiece] | threading.Event | None]
        self._arrived = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="iobench-check", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._arrived.put(None)
        self._thread.join()

    def watch(self, window: _Window, path: str) -> Callable[[int, int], None]:
        """Return a function to be called with the ranges of the file that are filled."""
        pieces = window.pieces[path]
        progress = Progress([(piece.start, piece.stop) for piece in pieces])
        window.left.update(pieces)

        def filled(start: int, stop: int) -> None:
            for place in progress.filled(start, stop):
                self._arrived.put((window, pieces[place]))

        return filled

    def failure_of(self, window: _Window) -> Exception | None:
        """Wait until all pieces of the window that arrived are delivered; return what failed."""
        taken = threading.Event()
        self._arrived.put(taken)
        taken.wait()
        if window.left and self._failure is None:
            self._failure = DataMismatchError(f"{min(window.left).name} did not arrive")
        return self._failure

    def _run(self) -> None:
        while (found := self._arrived.get()) is not None:
            if isinstance(found, threading.Event):
                found.set()
            elif self._failure is None:
                try:
                    self._take(*found)
                except Exception as error:  # noqa: BLE001 -- raised in the caller's thread
                    self._failure = error

    def _take(self, window: _Window, piece: StoredPiece) -> None:
        memory = window.memory[piece.path]
        data = memory[piece.start : piece.stop]
        right = xxhash.xxh3_64_hexdigest(data.data) == piece.xxh3_64
        if not right and self._read_again(memory, piece):
            right = xxhash.xxh3_64_hexdigest(data.data) == piece.xxh3_64
        if not right:
            raise DataMismatchError(
                f"{self._location}/{piece.path}: damaged, the checksum of {piece.name} differs"
            )
        if self._deliver(piece, data):
            window.kept.add(piece)
        window.left.remove(piece)

    def _read_again(self, memory: Bytes, piece: StoredPiece) -> bool:
        """Read a piece from another copy; return whether there is one."""
        read_again = getattr(self._writer, "read_again", None)  # of a load from two tiers
        if read_again is None:
            return False
        image = FileImage.of(piece.path, [memory])
        return bool(read_again(image, self._location, piece.start, piece.stop))


def _windows(pieces: Iterable[StoredPiece]) -> Iterator[dict[str, list[StoredPiece]]]:
    """Yield pieces by file, in an order that does not depend on the rank, up to 512 MiB at once.

    Gaps between them count where they are read.
    """
    window: dict[str, list[StoredPiece]] = {}
    size = 0
    for piece in sorted(pieces, key=lambda piece: (piece.path, piece.start)):
        before = window.get(piece.path)
        gap = piece.start - before[-1].stop if before else 0
        more = piece.stop - piece.start + (gap if gap < _GAP else 0)
        if size + more > _AT_ONCE and window:
            yield window
            window, size, more = {}, 0, piece.stop - piece.start
        window.setdefault(piece.path, []).append(piece)
        size += more
    if window:
        yield window


def _ranges(number: int, pieces: Sequence[StoredPiece]) -> Iterator[Range]:
    """Yield the ranges to read: pieces with small gaps between them are one range."""
    start, stop = pieces[0].start, pieces[0].stop
    for piece in pieces[1:]:
        if piece.start - stop >= _GAP:
            yield Range(number, start, stop)
            start = piece.start
        stop = max(stop, piece.stop)
    yield Range(number, start, stop)
