"""Reader: the ranks of a job read files together, by one of the modes of `restore_plan`.

`Transport` has the connections to the other ranks. An `Exchange` runs one plan in one rank: it
reads, sends and receives at the same time.
"""

from __future__ import annotations

import functools
import itertools
import queue
import secrets
import socket
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

from iobench.errors import RankError
from iobench.ranks.control import Control
from iobench.ranks.restore_plan import (
    MODES,
    Range,
    ReadMode,
    ReadPlan,
    RestoreMode,
    RingPiece,
    Shared,
    check_restore_mode,
    head,
    held_plan,
    merged,
    plan,
    shared,
)
from iobench.ranks.wire import Hello, Listener, Message, Welcome, Wire, introduce
from iobench.units import KIB, MIB
from iobench.writers.base import CopyReader
from iobench.writers.blocks.workers import Blocks
from iobench.writers.image import FileImage, Progress, WatchedImage
from iobench.writers.transfer import Meter, Transfer

_STALLED_S = 300.0
_GREETING_S = 20.0
_CONNECT_S = 60.0
_LOOK_S = 0.5
_ROOM = 1024
_STRANGERS = 64  # connections of others than ranks
_PURPOSE = "pieces of rank {}"


class SentPiece(Message):
    """The bytes of a numbered piece follow."""

    number: int


class Transport:
    """The connections of this rank to others. All ranks make, reset and close it together.

    A connection has one direction, and lives until `reset` or `close`. It is made when it is first
    used: by `outgoing` in the sender and `incoming` in the receiver, which each wait for the other.
    Its errors are RankErrors that name the other rank; also when the job is broken, and when no
    byte moves for 5 minutes: a rank may read from slow storage meanwhile.
    """

    def __init__(self, control: Control) -> None:
        """Listen, and exchange the addresses. Raises RankError."""
        self.control, self._world = control.sub("transport"), control.world
        self._changed = threading.Condition()
        self._listener: Listener | None = None
        self._open()

    def _open(self) -> None:
        self._outgoing: dict[int, Wire] = {}
        self._incoming: dict[int, Wire] = {}
        self._cut = False
        if self._world.size == 1:
            return
        interface = self.control.interface
        assert interface is not None  # a job of several ranks has one
        server = socket.create_server((interface.address, 0), backlog=_ROOM)
        port = server.getsockname()[1]
        token = secrets.token_hex(16) if self._world.rank == 0 else ""  # that of rank 0 counts
        own = [interface.address, port, token]
        found = self.control.all_gather("addresses", own, deadline_s=_CONNECT_S)
        self._addresses: list[tuple[str, int]] = [(host, port) for host, port, _ in found]
        self._token = found[0][-1].encode()
        self._listener = Listener(
            server,
            token=self._token,
            purpose=_PURPOSE.format(self._world.rank),
            admit=partial(self._admit, self._incoming),
            most=self._world.size + _STRANGERS,
            greeting_s=_GREETING_S,
        )

    def outgoing(self, rank: int) -> Wire:
        """Return the connection on which this rank sends to `rank`. Raises RankError."""
        if rank not in self._outgoing:
            address = self._addresses[rank]
            try:
                connection = socket.create_connection(address, timeout=_GREETING_S)
            except OSError as error:
                self.control.check()
                raise RankError(
                    "{} cannot be reached at {}:{}: {}".format(self._named(rank), *address, error),
                    ranks=[rank],
                ) from error
            wire = Wire(connection, "", _GREETING_S)
            try:
                # A stopped process accepts connections, and says nothing.
                self._name(wire, rank, _GREETING_S)
                purpose, own = _PURPOSE.format(rank), self._world.rank
                introduce(wire, self._token, purpose, rank=own)
                self._name(wire, rank, _STALLED_S)
            except BaseException:
                wire.close()
                raise
            self._outgoing[rank] = wire
        if self._cut:
            self._outgoing[rank].end()
        return self._outgoing[rank]

    def incoming(self, rank: int) -> Wire:
        """Return the connection on which `rank` sends to this rank; wait until it has connected."""
        until_s = time.monotonic() + _CONNECT_S
        with self._changed:
            while rank not in self._incoming:
                self.control.check()
                if self._cut:
                    raise RankError(f"rank {rank}: all connections were cut", ranks=[rank])
                if time.monotonic() > until_s:
                    raise RankError(
                        f"{self._named(rank)} did not connect within {_CONNECT_S:g} s",
                        ranks=[rank],
                    )
                self._changed.wait(_LOOK_S)
            return self._incoming[rank]

    def cut(self) -> None:
        """End all connections: no thread and no other rank waits on them then. `reset` follows."""
        for wire in self._ended():
            wire.end()

    def reset(self) -> None:
        """Make new connections when they are used next. All ranks do this after a failure."""
        self.close()
        self._open()

    def close(self) -> None:
        """Close all connections. A second call does nothing."""
        for wire in self._ended():
            wire.close()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _ended(self) -> list[Wire]:
        """Take no more connections; return those that there are."""
        with self._changed:
            self._cut = True
            self._changed.notify_all()
            return [*self._outgoing.values(), *self._incoming.values()]

    def _named(self, rank: int) -> str:
        return f"rank {rank} (host {self.control.hosts[rank]})"

    def _name(self, wire: Wire, rank: int, limit_s: float) -> None:
        """Let the errors of `wire` name the rank at its other end."""
        wire.other = self._named(rank)
        wire.failure = partial(RankError, ranks=[rank])
        wire.limit(limit_s, self.control.check)

    def _admit(self, incoming: dict[int, Wire], wire: Wire, hello: Hello, welcome: Welcome) -> None:
        """Take the connection of a rank that has proven itself; the listener's thread calls it."""
        if not 0 <= hello.rank < self._world.size:
            raise wire.failed("is not a rank of this job")
        self._name(wire, hello.rank, _STALLED_S)
        with self._changed:
            if self._cut or incoming is not self._incoming or hello.rank in incoming:
                raise wire.failed("came too late, or a second time")
            wire.send(welcome)
            incoming[hello.rank] = wire
            self._changed.notify_all()


_NETWORK = "network"
_TURN = 256 * MIB


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
        held: Mapping[int, FileImage] = MappingProxyType({}),
    ) -> None:
        """`images` maps the numbers of the files in the plan to images in host memory.

        Pieces of files that are `held` in memory are sent from there, and not read.
        """
        self._images, self._copy, self._held = images, copy, held
        self._transport, self._rank, self._ranges = transport, rank, made.reads[rank]
        self._pieces: dict[int, RingPiece] = {}
        self._due: dict[int, set[int]] = defaultdict(set)  # pieces by the rank that sends them
        self._sends: Counter[int] = Counter()
        own: dict[int, list[int]] = defaultdict(list)
        ready: list[int] = []
        for number, piece in enumerate(made.pieces):
            if rank not in piece.ring:
                continue
            self._pieces[number] = piece
            sender, receiver = piece.before(rank), piece.after(rank)
            if sender is None and piece.file in held:
                ready.append(number)
            elif sender is None:
                own[piece.file].append(number)
            else:
                self._due[sender].add(number)
            if receiver is not None:
                self._sends[receiver] += 1
        self._queues = {peer: queue.SimpleQueue[int | None]() for peer in self._sends}
        for number in ready:
            self._pass_on(number)
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
        # Where no other rank waits or is waited for, a file is read at once.
        turn = _TURN if self._sends or self._due else sys.maxsize
        for file, ranges in _in_turns(self._ranges, turn):
            if self.failure is not None:
                return
            image = self._images[file]
            if file in self._own:
                image = WatchedImage(image, functools.partial(self._filled, *self._own[file]))
            done = self._copy.read(image, ranges)
            self.meter.add(done, done.phases_s)
            for start, stop in ranges:  # a writer need not report every range
                image.filled(start, stop)

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
        own = piece.reader == self._rank and piece.file in self._held
        image = (self._held if own else self._images)[piece.file]
        wire.send(SentPiece(number), *image.views(piece.start, piece.stop))

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


def _in_turns(ranges: Iterable[Range], most: int) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Yield what is read at once: ranges of one file, at most `most` bytes.

    Between two turns, a rank ends if another one has failed.
    """
    for file, some in itertools.groupby(ranges, key=attrgetter("item")):
        turn, size = list[tuple[int, int]](), 0
        for start, stop in Blocks((one[1:] for one in some), most, most):
            if turn and size + stop - start > most:
                yield file, turn
                turn, size = [], 0
            turn.append((start, stop))
            size += stop - start
        yield file, turn


_PIECE = 4 * MIB
_SMALLEST_PIECE = 64 * KIB
_PIECES_OF_SAMPLE = 16  # so that the ranks read and pass on at the same time, like in a restore
_SAMPLE_PART = 64  # of the bytes, divided by the ranks: what a slow mode may cost
_MEASURED_PART = 8  # of the bytes, at most, are measured
_CERTAIN_S = 0.1  # a shorter time is that of other processes of the machine as well
_LEAST = 4 * KIB
_SMALLEST_SAMPLE, _LARGEST_SAMPLE = MIB, 256 * MIB


class OtherRankError(RankError):
    """Another rank could not read from storage. The ranks can go on together."""


class HeldBytes(NamedTuple):
    """Files in the memory of ranks, by number: `images` of this rank, and `holders` of all ranks.

    A rank that needs bytes of such a file gets them from a holder.
    """

    images: Mapping[int, FileImage]
    holders: Mapping[int, Sequence[int]]


class Reader:
    """Reads files for all ranks of a job. All ranks make the same calls, in the same order.

    `mode` "auto" measures the three modes on the first bytes that several ranks need, and reads
    all else by the fastest one. A sample is 1/64 of these bytes divided by the number of ranks: a
    mode that is as many times slower as there are ranks costs 2% of the fastest restore. Modes
    that take less than twice as long as the fastest one are measured again with twice the bytes,
    until that takes 0.1 s or 1/8 of the bytes is read.
    """

    def __init__(
        self,
        transport: Transport,
        mode: RestoreMode = "auto",
    ) -> None:
        check_restore_mode(mode)
        self._transport, self.control = transport, transport.control
        self._nodes = self.control.nodes
        self.mode: ReadMode | None = None if mode == "auto" else mode
        """The mode of the reads; None until "auto" has measured."""
        self._distinct = self._stored = 0
        self.measured: dict[ReadMode, float] = {}
        """What "auto" has measured: bytes that every rank got, per second of the slowest rank."""

    def read(
        self,
        images: Mapping[int, FileImage],
        copy: CopyReader,
        wanted: Iterable[Range],
        held: HeldBytes | None = None,
    ) -> Transfer:
        """Fill the ranges `wanted` of the memory of `images` from the files of `copy`.

        `images` has an image in host memory for each file in which this rank wants a range;
        `Range.item` is the number of the file, which is the same in all ranks. `image.filled` is
        called for each range that storage or another rank has filled: the caller compares all bytes
        with their checksums there, whatever way they came. With `held` there is no choice of a
        mode, and `copy` reads what this rank holds, and files that no rank holds.

        The Transfer counts the bytes of this rank: `paths` has those that it read, and `network`
        those that it received. Raises what `copy` raises for an error of this rank, and
        OtherRankError in the other ranks; RankError for a rank or a connection that is lost. The
        memory's content is undefined then.
        """
        meter, before = Meter(), self._stored
        own = merged(wanted)
        parts = self._parts(own)
        distinct = sum(part.size_bytes for part, _ in parts)
        reason = "asked"
        if self.mode is None and held is None:
            parts = self._measure(parts, images, copy, meter)
            reason = "fastest of a measurement" if self.measured else "too few bytes to measure"
        mode: ReadMode = self.mode or "all"
        made = (
            plan(parts, mode, self._nodes, piece_bytes=_PIECE)
            if held is None
            else held_plan(parts, held.holders, self._nodes, piece_bytes=_PIECE)
        )
        self._run(made, images, copy, meter, {} if held is None else held.images)
        if held is None and self.control.many:
            meter.decided(mode, reason)
        self._distinct += distinct
        size, files = sum(part.size_bytes for part in own), len({part.item for part in own})
        done = meter.transfer(copy.name, "read", size, durable=True, files=files)
        stored = self._stored - before
        several = distinct and self.control.many
        return replace(done, read_amplification=stored / distinct if several else None)

    @property
    def amplification(self) -> float | None:
        """Of all reads: the bytes that all ranks read, per byte that at least one wanted.

        None for one rank, and without bytes.
        """
        return self._stored / self._distinct if self._distinct and self.control.many else None

    def _parts(self, own: Sequence[Range]) -> list[Shared]:
        """Return what each rank wants. Equal ranges, as of replicated state, are sent once."""
        every = self.control.distinct("wanted", lambda: own)
        if all(ranges is own for ranges in every):
            return shared(every, self._nodes)
        return shared([[Range(*part) for part in ranges] for ranges in every], self._nodes)

    def _measure(
        self,
        parts: list[Shared],
        images: Mapping[int, FileImage],
        copy: CopyReader,
        meter: Meter,
    ) -> list[Shared]:
        """Choose the mode; return what is left to read. Too few bytes are not measured."""
        ranks = len(self._nodes)
        most = sum(part.size_bytes for part, ring in parts if len(ring) > 1) // _MEASURED_PART
        sample = most * _MEASURED_PART // (_SAMPLE_PART * ranks)
        if sample < _SMALLEST_SAMPLE // 4:
            return parts
        sample = min(max(sample, _SMALLEST_SAMPLE), _LARGEST_SAMPLE)

        def timed(mode: ReadMode, size: int) -> float:
            nonlocal parts, most
            taken, parts = head(parts, size)
            most -= size
            piece = min(max(size // _PIECES_OF_SAMPLE, _SMALLEST_PIECE), _PIECE)
            one = Meter()
            self._run(plan(taken, mode, self._nodes, piece_bytes=piece), images, copy, one)
            every = self.control.all_gather(mode, one.elapsed_s())
            slowest_s: float = max(every)
            meter.add(one, {f"measuring {mode}": slowest_s})
            return slowest_s

        timed("all-gather", _LEAST * ranks)  # makes the connections
        # What a read takes without bytes counts once in a restore, and not in its rate.
        least_s = {mode: timed(mode, _LEAST * ranks) for mode in MODES}
        left: Sequence[ReadMode] = MODES
        while True:
            spent_s = {mode: timed(mode, sample) for mode in left}
            for mode, whole_s in spent_s.items():
                self.measured[mode] = sample / max(whole_s - least_s[mode], whole_s / 4)
            best_s = min(spent_s.values())
            left = [mode for mode in left if spent_s[mode] < 2 * best_s]
            if len(left) == 1 or best_s > _CERTAIN_S or 2 * sample * len(left) > most:
                break
            sample *= 2
        best: ReadMode = max(left, key=self.measured.__getitem__)
        self.mode = best
        return parts

    def _run(
        self,
        made: ReadPlan,
        images: Mapping[int, FileImage],
        copy: CopyReader,
        meter: Meter,
        held: Mapping[int, FileImage] = MappingProxyType({}),
    ) -> None:
        """Run a plan; every rank learns whether all have succeeded."""
        rank, transport = self.control.world.rank, self._transport
        exchange = Exchange(made, images, copy=copy, transport=transport, rank=rank, held=held)
        try:
            exchange.run()
        except Exception as error:  # noqa: BLE001 -- raised below, once the others know
            failure: Exception | None = error
        else:
            failure = None
        meter.add(exchange.meter, exchange.meter.seconds)
        stored = sum(one.bytes for path, one in exchange.meter.paths.items() if path != _NETWORK)
        said = None if failure is None else [isinstance(failure, RankError), str(failure)]
        found = self.control.all_gather("exchange", [stored, said])
        self._stored += sum(stored for stored, _ in found)
        failed = {rank: one for rank, (_, one) in enumerate(found) if one is not None}
        if not failed:
            return
        self._transport.reset()
        if failure is not None and not isinstance(failure, RankError):
            raise failure
        # A rank that fails ends its connections, and its neighbours fail for that: not the cause.
        causes = {rank: text for rank, (link, text) in failed.items() if not link}
        named = causes or {rank: text for rank, (_, text) in failed.items()}
        kind = OtherRankError if causes else RankError
        raise kind(
            "; ".join(f"rank {rank} could not restore: {text}" for rank, text in named.items()),
            ranks=named,
        ) from failure
