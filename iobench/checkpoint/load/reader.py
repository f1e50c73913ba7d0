"""PieceReader: reads pieces of a checkpoint's files, and compares each with its checksum."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import xxhash

from iobench import linux
from iobench.checkpoint.load.stored import StoredPiece
from iobench.checkpoint.manifest import FileRecord
from iobench.environment.memory import host_takes_free_memory
from iobench.errors import DataMismatchError
from iobench.units import MIB
from iobench.writers.base import Writer
from iobench.writers.blocks.channel import Channel, Lease
from iobench.writers.blocks.pages import fresh_pages
from iobench.writers.image import Bytes, FileImage
from iobench.writers.transfer import Transfer

__all__ = ["Deliver", "DirectReader", "PieceReader", "another_copy", "check_piece"]

_AT_ONCE = 256 * MIB
_GAP = MIB  # smaller gaps between two pieces are read, not skipped


class Deliver(Protocol):
    """Takes the bytes of a piece, whose checksum is right."""

    def __call__(self, piece: StoredPiece, data: Bytes, *, lasting: bool) -> bool:
        """Return whether the bytes are still needed after the call: only if they are `lasting`."""


class PieceReader(Protocol):
    """How the pieces that a load needs reach this rank."""

    def read(
        self,
        location: str | Path,
        files: Mapping[str, FileRecord],
        pieces: Iterable[StoredPiece],
        deliver: Deliver,
    ) -> Transfer:
        """Deliver each of `pieces` once, in any order, after its checksum was compared.

        All ranks call it, each with the pieces that it needs. Raises DataMismatchError for a piece
        with another checksum and for a file of another size, and TransferError.
        """


def check_piece(
    piece: StoredPiece, data: Bytes, location: str | Path, again: Callable[[], bool] | None = None
) -> None:
    """Raise DataMismatchError if `data` are not the bytes of `piece`.

    `again` reads it from another copy, and returns whether there is one.
    """
    if xxhash.xxh3_64_hexdigest(data.data) == piece.xxh3_64:
        return
    if again is None or not again() or xxhash.xxh3_64_hexdigest(data.data) != piece.xxh3_64:
        raise DataMismatchError(
            f"{location}/{piece.path}: damaged, the checksum of {piece.name} differs"
        )


def another_copy(
    writer: Writer, memory: Bytes, location: str | Path, piece: StoredPiece
) -> Callable[[], bool]:
    """Return what reads the bytes of `piece` again into `memory`, that of its whole file."""

    def again() -> bool:
        read_again = getattr(writer, "read_again", None)  # of a load from two tiers
        if read_again is None:
            return False
        image = FileImage.of(piece.path, [memory])
        return bool(read_again(image, location, piece.start, piece.stop))

    return again


@dataclass
class _Run:
    """Pieces that are read together: whole pages from `start` to `stop`."""

    start: int
    stop: int
    pieces: list[StoredPiece]


class DirectReader:
    """Reads what this rank needs from storage, up to 256 MiB at once, through `writer`.

    Storage delivers the next run of pieces while the last one is compared and copied.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def read(
        self,
        location: str | Path,
        files: Mapping[str, FileRecord],
        pieces: Iterable[StoredPiece],
        deliver: Deliver,
    ) -> Transfer:
        """Read the pieces; see PieceReader."""
        by_file: dict[str, list[StoredPiece]] = {}
        for piece in pieces:
            by_file.setdefault(piece.path, []).append(piece)
        transfers = [
            transfer
            for path, wanted in by_file.items()
            for transfer in self._read_file(location, files[path], wanted, deliver)
        ]
        return Transfer.total(transfers or [self._nothing()])

    def _nothing(self) -> Transfer:
        return self._writer._meter().transfer(self._writer.name, "read", 0, durable=True, files=0)

    def _read_file(
        self,
        location: str | Path,
        file: FileRecord,
        wanted: Sequence[StoredPiece],
        deliver: Deliver,
    ) -> list[Transfer]:
        # Address space for the whole file. Pages take memory when they are read, and give_up_pages
        # below frees them once they are copied.
        memory = fresh_pages(file.size_bytes, huge=not host_takes_free_memory())
        image = FileImage.of(file.path, [memory])
        transfers: list[Transfer] = []

        def fetch(run: _Run) -> None:
            stop = min(run.stop, file.size_bytes)
            start = min(run.start, stop)
            transfers.append(self._writer.read(image, location, start=start, stop=stop))

        ahead: Channel[_Run] = Channel(lambda: ahead.serve(fetch), name="iobench-load", limit=2)
        leases = [Lease(run) for run in _runs(wanted)]
        try:
            ahead.submit(leases[0])
            done = 0
            for lease, following in itertools.zip_longest(leases, leases[1:]):
                ahead.wait(lease)
                if following:
                    ahead.submit(following)
                for piece in lease.item.pieces:
                    data = memory[piece.start : piece.stop]
                    again = another_copy(self._writer, memory, location, piece)
                    check_piece(piece, data, location, again)
                    if deliver(piece, data, lasting=True):
                        linux.give_up_pages(memory.ctypes.data + done, piece.start - done)
                        done = piece.stop
                stop = following.item.pieces[0].start if following else file.size_bytes
                linux.give_up_pages(memory.ctypes.data + done, stop - done)
                done = max(done, stop - stop % linux.PAGE)
        finally:
            ahead.close(drop=True)
        return transfers


def _runs(pieces: Sequence[StoredPiece]) -> Iterator[_Run]:
    """Group the pieces by file offset: those near each other become one run.

    Runs are whole pages, and no page is in two of them: its bytes are compared only once. So a
    piece may begin in the last page of the run before.
    """
    run: _Run | None = None
    for piece in sorted(pieces, key=lambda piece: piece.start):
        start = piece.start - piece.start % linux.PAGE
        stop = -(-piece.stop // linux.PAGE) * linux.PAGE
        if run and start - run.stop < _GAP and max(stop, run.stop) - run.start <= _AT_ONCE:
            run.stop = max(stop, run.stop)
            run.pieces.append(piece)
            continue
        if run:
            start = max(start, run.stop)
            yield run
        run = _Run(start, stop, [piece])
    if run:
        yield run
