"""Exchange: one rank's part of a restore plan. It reads, sends and receives at the same time."""

from __future__ import annotations

import functools
import queue
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from iobench.errors import RankError
from iobench.ranks.progress import Progress, WatchedImage
from iobench.ranks.restore_plan import ReadPlan, RingPiece
from iobench.ranks.slices import Range
from iobench.ranks.transport import SentPiece, Transport
from iobench.ranks.wire import Wire
from iobench.units import MIB
from iobench.writers.copy_reader import CopyReader
from iobench.writers.image import FileImage
from iobench.writers.transfer import Meter

__all__ = ["Exchange"]

_NETWORK = "network"
_RUN = 256 * MIB


class Exchange:
    """Runs a plan once in one rank.

    This thread reads this rank's ranges. As soon as a piece is read or received, a thread for each
    neighbour sends it on. The memory is the image's own: pieces are neither copied nor collected.
    """

    def __init__(
        self,
        made: ReadPlan,
        images: Mapping[int, FileImage],
        *,
        copy: CopyReader,
        transport: Transport,
        rank: int,
    ) -> None:
        """`images` maps the numbers of the files in the plan to images in host memory."""
        self._images, self._copy = images, copy
        self._transport, self._rank, self._ranges = transport, rank, made.reads[rank]
        self._pieces: dict[int, RingPiece] = {}
        self._due: dict[int, set[int]] = defaultdict(set)  # pieces by the rank that sends them
        self._sends: Counter[int] = Counter()
        own: dict[int, list[int]] = defaultdict(list)
        for number, piece in enumerate(made.pieces):
            if rank not in piece.ring:
                continue
            self._pieces[number] = piece
            sender, receiver = piece.before(rank), piece.after(rank)
            if sender is None:
                own[piece.file].append(number)
            else:
                self._due[sender].add(number)
            if receiver is not None:
                self._sends[receiver] += 1
        self._queues = {peer: queue.SimpleQueue[int | None]() for peer in self._sends}
        self._own = {file: self._progress(numbers) for file, numbers in own.items()}
        self._lock = threading.Lock()
        self.failure: BaseException | None = None
        """What stopped this rank: an error of its own rather than the end of a connection."""
        self.meter = Meter()

    def _progress(self, numbers: list[int]) -> tuple[list[int], Progress]:
        """Return the pieces of one file in its order, and the progress of reading them."""
        numbers.sort(key=lambda number: self._pieces[number].start)
        parts = [(self._pieces[number].start, self._pieces[number].stop) for number in numbers]
        return numbers, Progress(parts)

    def run(self) -> None:
        """Fill the memory of all that this rank wants; on return it may change.

        Raises the error that stopped this rank: RankError for a connection, or what `copy`
        raises. The links are cut then.
        """
        threads = [
            threading.Thread(
                target=self._guard, args=(work, peer), name=f"iobench-{verb}-{peer}", daemon=True
            )
            for verb, work, peers in (
                ("send", self._send_to, self._sends),
                ("receive", self._receive_from, self._due),
            )
            for peer in peers
        ]
        for thread in threads:
            thread.start()
        try:
            self._read()
            for thread in threads:
                thread.join()
        except BaseException as error:
            self._stop(error)
            for thread in threads:
                thread.join()
            raise
        if self.failure is not None:
            raise self.failure

    def _guard(self, work: Callable[[int], None], peer: int) -> None:
        try:
            work(peer)
        except BaseException as error:  # noqa: BLE001 -- `run` raises it in the caller's thread
            self._stop(error)

    def _stop(self, error: BaseException) -> None:
        """End all waits of this rank's threads, and through the connections those of the others."""
        with self._lock:
            if self.failure is None or isinstance(self.failure, RankError):
                self.failure = error
        self._transport.cut()
        for waiting in self._queues.values():
            waiting.put(None)

    def _read(self) -> None:
        for file, start, stop in _in_runs(self._ranges):
            if self.failure is not None:
                return
            image = self._images[file]
            own = self._own.get(file)
            noted = None if own is None else functools.partial(self._filled, *own)
            if noted is not None:
                image = WatchedImage(image, noted)
            done = self._copy.read(image, start, stop)
            self.meter.add(done, done.phases_s)
            if noted is not None:  # a writer need not report every range
                noted(start, stop)

    def _filled(self, numbers: list[int], progress: Progress, start: int, stop: int) -> None:
        for place in progress.filled(start, stop):
            self._pass_on(numbers[place])

    def _pass_on(self, number: int) -> None:
        receiver = self._pieces[number].after(self._rank)
        if receiver is not None:
            self._queues[receiver].put(number)

    def _send_to(self, peer: int) -> None:
        wire = self._transport.outgoing(peer)
        for _ in range(self._sends[peer]):
            number = self._queues[peer].get()
            if number is None:
                return
            self._send_piece(wire, number)

    def _send_piece(self, wire: Wire, number: int) -> None:
        piece = self._pieces[number]
        wire.send(SentPiece(number), *self._images[piece.file].views(piece.start, piece.stop))

    def _receive_from(self, peer: int) -> None:
        wire, due = self._transport.incoming(peer), self._due[peer]
        received = Meter()
        while due:
            number = self._receive_piece(wire, due)
            due.remove(number)
            piece = self._pieces[number]
            self._images[piece.file].filled(piece.start, piece.stop)
            self._pass_on(number)
            received.count(_NETWORK, piece.stop - piece.start)
        with self._lock:
            self.meter.add(received, {})

    def _receive_piece(self, wire: Wire, due: set[int]) -> int:
        message, size = wire.receive(SentPiece)
        piece = self._pieces[message.number] if message.number in due else None
        if piece is None or size != piece.stop - piece.start:
            raise wire.failed(
                f"sent {size} bytes as piece {message.number}, which is not in the plan of this "
                "rank"
            )
        wire.take_into(*self._images[piece.file].views(piece.start, piece.stop))
        return message.number


def _in_runs(ranges: Iterable[Range]) -> Iterator[Range]:
    """Cut the ranges so that a rank soon ends when another one has failed."""
    for file, start, stop in ranges:
        for begin in range(start, stop, _RUN):
            yield Range(file, begin, min(begin + _RUN, stop))
