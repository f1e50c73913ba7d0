"""Reader: the ranks of a job read files together, by one of the modes of `restore_plan`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from iobench.errors import RankError
from iobench.ranks.exchange import Exchange, Transport
from iobench.ranks.restore_plan import (
    MODES,
    Range,
    ReadMode,
    ReadPlan,
    RestoreMode,
    Shared,
    check_restore_mode,
    head,
    held_plan,
    merged,
    plan,
    shared,
)
from iobench.units import KIB, MIB
from iobench.writers.base import CopyReader
from iobench.writers.image import FileImage
from iobench.writers.transfer import Meter, Transfer

__all__ = ["HeldBytes", "OtherRankError", "Reader"]

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
        *,
        deadline_s: float = 3600.0,
    ) -> None:
        """`deadline_s`: how long one rank may be behind another at the end of a read."""
        check_restore_mode(mode)
        self._transport, self.deadline_s = transport, deadline_s
        self.control = transport.control
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
        meter = Meter()
        own = merged(wanted)
        parts = self._parts(own)
        distinct = sum(part.size_bytes for part in parts)
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
        if held is None and len(self._nodes) > 1:
            meter.decided(mode, reason)
        from_storage = sum(count.bytes for path, count in meter.paths.items() if path != "network")
        every = self.control.all_gather("read", from_storage, deadline_s=self.deadline_s)
        self._distinct += distinct
        self._stored += sum(every)
        size, files = sum(part.size_bytes for part in own), len({part.item for part in own})
        done = meter.transfer(copy.name, "read", size, durable=True, files=files)
        several = distinct and len(every) > 1
        return replace(done, read_amplification=sum(every) / distinct if several else None)

    @property
    def amplification(self) -> float | None:
        """Of all reads: the bytes that all ranks read, per byte that at least one wanted.

        None for one rank, and without bytes.
        """
        return self._stored / self._distinct if self._distinct and len(self._nodes) > 1 else None

    def refuse(self, error: Exception) -> None:
        """Take part in a `read` of the others with `error`, which raises RankError in them."""
        with suppress(RankError):
            self.control.all_gather("wanted", None, deadline_s=self.deadline_s, error=error)

    @property
    def _nodes(self) -> Sequence[int]:
        return self._transport.nodes

    def _parts(self, own: Sequence[Range]) -> list[Shared]:
        """Return what each rank wants. Equal ranges, as of replicated state, are not sent."""
        if len(self._nodes) == 1:
            return shared([own], self._nodes)
        text = json.dumps(own, separators=(",", ":"))
        digest = hashlib.sha256(text.encode()).hexdigest()
        digests = self.control.all_gather("wanted", digest, deadline_s=self.deadline_s)
        if all(other == digest for other in digests):
            return shared([own] * len(digests), self._nodes)
        every = self.control.all_gather("ranges", own, deadline_s=self.deadline_s)
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
        most = sum(part.size_bytes for part in parts if len(part.ring) > 1) // _MEASURED_PART
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
            every = self.control.all_gather(mode, one.elapsed_s(), deadline_s=self.deadline_s)
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
        said = None if failure is None else [isinstance(failure, RankError), str(failure)]
        found = self.control.all_gather("exchange", said, deadline_s=self.deadline_s)
        failed = {rank: one for rank, one in enumerate(found) if one is not None}
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
