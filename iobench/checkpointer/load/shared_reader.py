"""SharedReader: the pieces that several ranks need are read once, and passed on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from iobench import linux
from iobench.checkpoint.load.reader import Deliver, another_copy, check_piece
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
from iobench.units import GIB, MIB
from iobench.writers.base import Writer
from iobench.writers.blocks.pages import fresh_pages
from iobench.writers.image import Bytes, FileImage
from iobench.writers.transfer import Transfer

__all__ = ["SharedReader", "shared_reader"]

_AT_ONCE = GIB
_GAP = MIB  # smaller gaps between two pieces are read, not skipped


class SharedReader:
    """A PieceReader for all ranks of a job, by one of the restore modes. For one load.

    Each rank compares every piece with its checksum, whether it came from storage or from another
    rank, in a thread of its own while the next ones arrive. A rank has up to 1 GiB of pieces in
    memory at once; ranks that need the same pieces need them in the same order.
    """

    def __init__(
        self,
        reader: Reader,
        writer: Writer,
        control: Control,
        *,
        deadline_s: float,
        owners: Mapping[str, int] | None = None,
    ) -> None:
        """`owners`: the rank that reads each file, in place of a choice by the restore mode."""
        self._writer, self._owners = writer, owners
        self._reader, self._control, self._deadline_s = reader, control, deadline_s
        self._begun = False

    def read(
        self,
        location: str | Path,
        files: Mapping[str, FileRecord],
        pieces: Iterable[StoredPiece],
        deliver: Deliver,
    ) -> Transfer:
        """Read the pieces; see PieceReader.

        A failure of another rank raises DataMismatchError too: the load fails in all ranks alike.
        """
        windows = list(_windows(pieces))
        self._begun = True
        counts = self._agree("pieces", {"windows": len(windows)})
        numbers = {path: number for number, path in enumerate(sorted(files))}
        memory: dict[str, Bytes] = {}
        transfers = []
        for at in range(max(int(one["windows"]) for one in counts)):
            window = windows[at] if at < len(windows) else {}
            memory = {path: memory[path] for path in window if path in memory}
            sizes = {path: files[path].size_bytes for path in window.keys() - memory.keys()}
            check = _Check(self._writer, location, memory, deliver)
            transfers.append(self._read_window(location, numbers, window, memory, sizes, check))
        reader = self._reader
        if not transfers:
            transfers.append(reader.read({}, str(location), []))
        whole = reader.storage_bytes / reader.distinct_bytes if reader.distinct_bytes else None
        return replace(Transfer.total(transfers), read_amplification=whole)

    def finish(self) -> None:
        """Release the other ranks if this one failed before it read: they wait for it."""
        if not self._begun:
            self._tell("pieces", {"error": "it failed before it read"})

    def _read_window(
        self,
        location: str | Path,
        numbers: Mapping[str, int],
        window: Mapping[str, Sequence[StoredPiece]],
        memory: dict[str, Bytes],
        sizes: Mapping[str, int],
        check: _Check,
    ) -> Transfer:
        images: dict[int, FileImage] = {}
        wanted: list[Range] = []
        try:
            for path, size in sizes.items():
                # Address space for the whole file. Pages take memory when they are filled, and
                # are given up with the window.
                memory[path] = fresh_pages(size, huge=not host_takes_free_memory())
            for path, pieces in window.items():
                image = FileImage.of(path, [memory[path]])
                images[numbers[path]] = WatchedImage(image, check.watch(pieces))
                wanted += _ranges(numbers[path], pieces)
            check.start()
        except Exception as error:
            self._reader.refuse(error)  # the other ranks wait for what this one wants
            raise
        owners = None
        if self._owners is not None:
            owners = {numbers[at]: rank for at, rank in self._owners.items() if at in numbers}
        try:
            done = self._reader.read(images, str(location), wanted, owners)
        except OtherRankError as error:
            raise DataMismatchError(str(error)) from error
        finally:
            check.end()
        wrong = check.failure
        self._agree("checked", {"error": None if wrong is None else str(wrong)}, wrong)
        for path, pieces in window.items():
            start, stop = pieces[0].start, pieces[-1].stop
            linux.give_up_pages(memory[path].ctypes.data + start, stop - start)
        return done

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
        return self._control.all_gather(phase, value, deadline_s=self._deadline_s)


@contextmanager
def shared_reader(
    control: Control,
    writer: Writer,
    mode: RestoreMode,
    *,
    deadline_s: float,
    owners: Mapping[str, int] | None = None,
) -> Iterator[Callable[[], SharedReader | None]]:
    """Provide what makes the reader of one checkpoint, None if each rank reads what it needs.

    With `owners` the mode does not count: each file is read by its owner. The connections to the
    other ranks end with the block.
    """
    if mode == "all" and owners is None:
        yield lambda: None
        return
    with Transport(control) as transport:
        modes = Reader(writer, transport, mode, deadline_s=deadline_s)
        own = control.sub("load")
        yield lambda: SharedReader(modes, writer, own, deadline_s=deadline_s, owners=owners)


class _Check:
    """Compares pieces with their checksums and delivers them, in a thread, as they arrive."""

    def __init__(
        self,
        writer: Writer,
        location: str | Path,
        memory: Mapping[str, Bytes],
        deliver: Deliver,
    ) -> None:
        self._writer, self._location = writer, location
        self._memory, self._deliver = memory, deliver
        self._arrived: queue.SimpleQueue[StoredPiece | None] = queue.SimpleQueue()
        self._left: dict[StoredPiece, None] = {}
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="iobench-check", daemon=True)

    def start(self) -> None:
        """Start the thread; then call `end`."""
        self._thread.start()

    def watch(self, pieces: Sequence[StoredPiece]) -> Any:
        """Return a function to be called with the ranges of the file that are filled."""
        progress = Progress([(piece.start, piece.stop) for piece in pieces])
        self._left.update(dict.fromkeys(pieces))

        def filled(start: int, stop: int) -> None:
            for place in progress.filled(start, stop):
                self._arrived.put(pieces[place])

        return filled

    def end(self) -> None:
        """Wait until all pieces that arrived are delivered."""
        self._arrived.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (piece := self._arrived.get()) is not None:
            self._take(piece)
        if self._left and self.failure is None:
            self.failure = DataMismatchError(f"{next(iter(self._left)).name} did not arrive")

    def _take(self, piece: StoredPiece) -> None:
        if self.failure is not None:
            return
        memory = self._memory[piece.path]
        data = memory[piece.start : piece.stop]
        try:
            again = another_copy(self._writer, memory, self._location, piece)
            check_piece(piece, data, self._location, again)
            self._deliver(piece, data, lasting=False)
            del self._left[piece]
        except Exception as error:  # noqa: BLE001 -- raised in the caller's thread
            self.failure = error


def _windows(pieces: Iterable[StoredPiece]) -> Iterator[dict[str, list[StoredPiece]]]:
    """Yield pieces by file, in an order that does not depend on the rank, up to 1 GiB at once."""
    window: dict[str, list[StoredPiece]] = {}
    size = 0
    for piece in sorted(pieces, key=lambda piece: (piece.path, piece.start)):
        if size + piece.stop - piece.start > _AT_ONCE and window:
            yield window
            window, size = {}, 0
        window.setdefault(piece.path, []).append(piece)
        size += piece.stop - piece.start
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
