"""PieceReader: delivers the pieces of a checkpoint that a rank needs, once each is compared."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self, cast

import xxhash

from iobench import linux
from iobench.checkpoint.manifest import FileRecord
from iobench.errors import DataMismatchError, RankError
from iobench.formats.tensor_slices import GAP_BYTES, room_for
from iobench.ranks.control import ALONE, Control
from iobench.ranks.exchange import HeldBytes, OtherRankError, Reader, Transport
from iobench.ranks.restore_plan import Range, RestoreMode
from iobench.units import MIB
from iobench.writers.base import CopyReader
from iobench.writers.image import Bytes, FileImage, Progress, Segment, WatchedImage
from iobench.writers.transfer import Transfer

AT_ONCE = 512 * MIB
"""Bytes of the pieces that are read at once."""


class StoredPiece(NamedTuple):
    """The bytes [start, stop) of the file `path`, and their XXH3-64 in hex.

    None in a format without checksums.
    """

    path: str
    start: int
    stop: int
    xxh3_64: str | None
    name: str


def pieces_of(file: FileRecord) -> list[StoredPiece]:
    """Return the pieces of a file, in order."""
    ends = itertools.accumulate(piece.size_bytes for piece in file.pieces)
    return [
        StoredPiece(file.path, end - piece.size_bytes, end, piece.xxh3_64, piece.name)
        for piece, end in zip(file.pieces, ends, strict=True)
    ]


Deliver = Callable[[StoredPiece, Bytes], bool]
"""Takes the bytes of a piece, whose checksum is right, in a thread of the reader.

Returns whether the bytes are needed after the call. Then they stay in this memory."""


class HeldFiles(NamedTuple):
    """Files of a checkpoint in the memory of ranks, by path; see HeldBytes."""

    images: Mapping[str, FileImage]
    holders: Mapping[str, Sequence[int]]


class PieceReader:
    """Reads the pieces that this rank needs. For one load.

    By itself, or by `reader` together with the other ranks, which all make the same calls. `held`
    has the files in the memory of ranks, in place of a choice by the restore mode. Each rank
    compares every piece with its checksum, whether it came from storage or from another rank, in a
    thread of its own while the next ones arrive. Up to two windows of 512 MiB of pieces are in
    memory at once; ranks that need the same pieces need them in the same order.
    """

    def __init__(self, reader: Reader | None = None, held: HeldFiles | None = None) -> None:
        self._reader = reader or Reader(Transport(ALONE), "all")
        self._held = held
        self._begun = False

    def read(
        self,
        copy: CopyReader,
        files: Mapping[str, FileRecord],
        pieces: Iterable[StoredPiece],
        deliver: Deliver,
    ) -> Transfer:
        """Deliver each of `pieces` of `copy` once, in any order, after its checksum was compared.

        Raises DataMismatchError for a piece with another checksum and for a file of another size,
        and TransferError. A failure of another rank raises DataMismatchError too: the load fails in
        all ranks alike.
        """
        every = list(windows(pieces, AT_ONCE))
        numbers = {path: number for number, path in enumerate(sorted(files))}
        last = _Window()
        transfers = []
        with _Check(copy, deliver) as check:  # all that may fail here is before `_begun`
            self._begun = True
            counts = self._agree("pieces", {"windows": len(every)})
            for at in range(max(int(one["windows"]) for one in counts)):
                wanted = every[at] if at < len(every) else {}
                window, images, ranges = self._prepared(wanted, files, numbers, check)
                transfers.append(self._fetch(copy, images, ranges, numbers))
                self._finish(last, check)
                last = window
            self._finish(last, check)
        if not transfers:
            transfers.append(self._fetch(copy, {}, [], numbers))
        return replace(Transfer.total(transfers), read_amplification=self._reader.amplification)

    def finish(self) -> None:
        """Release the other ranks if this one failed before it read: they wait for it."""
        if not self._begun:
            self._reader.control.all_gather("pieces", {"error": "it failed before it read"})

    def _prepared(
        self,
        wanted: Mapping[str, list[StoredPiece]],
        files: Mapping[str, FileRecord],
        numbers: Mapping[str, int],
        check: _Check,
    ) -> tuple[_Window, dict[int, FileImage], list[Range]]:
        """Return a window with its memory, the images to fill, and the ranges to read."""
        images: dict[int, FileImage] = {}
        ranges: list[Range] = []
        try:
            window = _Window()
            for path, pieces in wanted.items():
                runs = [_Run.of(run) for run in _runs(pieces)]
                window.runs += runs
                image = _PartialImage(path, files[path].size_bytes, [run.segment for run in runs])
                window.images[path] = image
                images[numbers[path]] = WatchedImage(image, check.watch(window, pieces))
                ranges += [Range(numbers[path], *run.range) for run in runs]
        except Exception as error:
            with suppress(RankError):  # the others wait for what this rank wants, and fail too
                self._reader.control.all_gather("wanted", error=error)
            raise
        return window, images, ranges

    def _fetch(
        self,
        copy: CopyReader,
        images: Mapping[int, FileImage],
        wanted: Sequence[Range],
        numbers: Mapping[str, int],
    ) -> Transfer:
        held, named = None, self._held
        if named is not None:
            held = HeldBytes(
                {numbers[at]: one for at, one in named.images.items() if at in numbers},
                {numbers[at]: ranks for at, ranks in named.holders.items() if at in numbers},
            )
        try:
            return self._reader.read(images, copy, wanted, held)
        except OtherRankError as error:
            raise DataMismatchError(str(error)) from error

    def _finish(self, window: _Window, check: _Check) -> None:
        """Wait until all pieces of a window are delivered, in all ranks; free what is not kept."""
        wrong = check.failure_of(window)
        self._agree("checked", {"error": None if wrong is None else str(wrong)}, wrong)
        for run in window.runs:
            run.free(window.kept)

    def _agree(
        self, phase: str, value: dict[str, Any], error: BaseException | None = None
    ) -> list[Any]:
        """Return what all ranks told. Raises `error`, or DataMismatchError for that of others."""
        every = self._reader.control.all_gather(phase, value)
        if error is not None:
            raise error
        failed = {rank: one["error"] for rank, one in enumerate(every) if one.get("error")}
        if failed:
            raise DataMismatchError("; ".join(f"rank {r}: {text}" for r, text in failed.items()))
        return every


@contextmanager
def shared_reader(
    control: Control, mode: RestoreMode, *, in_memory: bool = False
) -> Iterator[Reader | None]:
    """Provide the Reader of all ranks, by a restore mode; None: each rank reads by itself.

    For files that are `in_memory` of ranks the mode does not count. The connections to the other
    ranks end with the block.
    """
    if control.world.size == 1 or (mode == "all" and not in_memory):
        yield None
        return
    with closing(Transport(control)) as transport:
        yield Reader(transport, mode)


class _PartialImage(FileImage):
    """A file of which only the segments are in memory; no other bytes of it can be moved."""

    def __init__(self, path: str, size_bytes: int, segments: list[Segment]) -> None:
        self._describe(path, [segment.offset for segment in segments], size_bytes)
        self._parts = [segment.memory for segment in segments]


class _Run(NamedTuple):
    """Pieces of a file that are read together, with the small gaps between them."""

    pieces: list[StoredPiece]
    segment: Segment

    @classmethod
    def of(cls, pieces: list[StoredPiece]) -> _Run:
        """Return the run with new memory. Raises OSError (ENOMEM)."""
        start, stop = pieces[0].start, pieces[-1].stop
        memory = room_for(start, stop)
        return cls(pieces, Segment(offset=start, length=stop - start, memory=memory))

    @property
    def range(self) -> tuple[int, int]:
        """The bytes [start, stop) of the file."""
        return self.segment.offset, self.segment.offset + self.segment.length

    def free(self, kept: set[StoredPiece]) -> None:
        """Give up the pages of all bytes but those of the pieces in `kept`."""
        memory, done = cast(Bytes, self.segment.memory), self.segment.offset
        base = memory.ctypes.data - done
        for piece in self.pieces:
            if piece in kept:
                linux.give_up_pages(base + done, piece.start - done)
                done = piece.stop
        linux.give_up_pages(base + done, self.range[1] - done)


@dataclass(kw_only=True, eq=False)
class _Window:
    """What is in memory at once. `left` are the pieces that did not arrive yet."""

    runs: list[_Run] = field(default_factory=list)
    images: dict[str, FileImage] = field(default_factory=dict)
    left: set[StoredPiece] = field(default_factory=set)
    kept: set[StoredPiece] = field(default_factory=set)


class _Check:
    """Compares pieces with their checksums and delivers them, in a thread, as they arrive."""

    def __init__(self, copy: CopyReader, deliver: Deliver) -> None:
        self._copy, self._deliver = copy, deliver
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

    def watch(self, window: _Window, pieces: Sequence[StoredPiece]) -> Callable[[int, int], None]:
        """Return a function to be called with the ranges of the file that are filled."""
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
        image = window.images[piece.path]
        (data,) = image.views(piece.start, piece.stop)
        wanted = piece.xxh3_64
        while wanted is not None and xxhash.xxh3_64_hexdigest(data.data) != wanted:
            if not self._copy.read_again(image, piece.start, piece.stop, piece.name):
                raise DataMismatchError(
                    f"{self._copy.location}/{piece.path}: damaged, the checksum of {piece.name} "
                    "differs"
                )
        if self._deliver(piece, data):
            window.kept.add(piece)
        window.left.remove(piece)


def windows(pieces: Iterable[StoredPiece], at_once: int) -> Iterator[dict[str, list[StoredPiece]]]:
    """Yield pieces by file, in an order that does not depend on the rank, `at_once` bytes or less.

    Gaps between them count where they are read.
    """
    window: dict[str, list[StoredPiece]] = {}
    size = 0
    for piece in sorted(pieces, key=lambda piece: (piece.path, piece.start)):
        before = window.get(piece.path)
        gap = piece.start - before[-1].stop if before else 0
        more = piece.stop - piece.start + (gap if gap < GAP_BYTES else 0)
        if size + more > at_once and window:
            yield window
            window, size, more = {}, 0, piece.stop - piece.start
        window.setdefault(piece.path, []).append(piece)
        size += more
    if window:
        yield window


def _runs(pieces: Sequence[StoredPiece]) -> Iterator[list[StoredPiece]]:
    """Yield the pieces of a file that are read together: those with small gaps between them."""
    run = [pieces[0]]
    for piece in pieces[1:]:
        if piece.start - run[-1].stop >= GAP_BYTES:
            yield run
            run = []
        run.append(piece)
    yield run
