"""Sender: sends the bytes of each rank to the rank that keeps the copy of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from iobench.ranks.control import Control
from iobench.ranks.exchange import Transport
from iobench.ranks.restore_mode import HeldBytes, Reader
from iobench.ranks.restore_plan import Range
from iobench.ranks.together import together
from iobench.remote.snapshot_memory import MemoryReader
from iobench.replicas.directory import ReplicaDirectory
from iobench.replicas.partner import Partner
from iobench.replicas.recovery import SaveHeader, Version
from iobench.units import MIB
from iobench.writers.image import FileImage
from iobench.writers.rate_limit import RateLimit

__all__ = ["Sender"]

_LIMIT_S = 24 * 3600.0  # a lost rank is known long before
_SMALLEST_PROBE, _LARGEST_PROBE = 4 * MIB, 64 * MIB
_PROBE_S = 0.05


class Sender:
    """The connections between partners. The constructor and `send` are calls of all ranks.

    A rank sends no faster than its share of the rate of its node, which is given or measured.
    """

    def __init__(self, partner: Partner, control: Control, directory: ReplicaDirectory) -> None:
        self._partner, self._control, self._directory = partner, control, directory
        self._transport = Transport(control)
        self.nodes: Sequence[int] = self._transport.nodes
        """The node of each rank."""
        self.receivers = partner.receivers(self.nodes)
        """The rank that keeps the copy of each rank; empty with one node."""
        self._limit = RateLimit(self._pace() if self.receivers else None)

    def _pace(self) -> float:
        """Return what this rank may send in a second."""
        world, given = self._control.world, self._partner.rate_bytes_per_s
        if given is not None:
            return given / world.local_size
        size = _SMALLEST_PROBE
        while True:
            began_s = time.monotonic()
            self._exchange([_memory(size)], {rank: [_memory(size)] for rank in self._kept})
            own_s = time.monotonic() - began_s
            slowest_s: float = max(self._control.all_gather("probe", own_s, deadline_s=_LIMIT_S))
            if slowest_s >= _PROBE_S or size >= _LARGEST_PROBE:
                return self._partner.share * size / slowest_s
            size *= 4  # too short: most of it was the begin

    @property
    def _kept(self) -> list[int]:
        """The ranks of which this rank keeps a copy."""
        return [rank for rank, to in enumerate(self.receivers) if to == self._control.world.rank]

    def send(self, version: Version, header: bytes, sizes: Sequence[Sequence[int]]) -> None:
        """Send the bytes of this rank and their header. On return all ranks have all copies.

        `sizes` has the bytes of the file and of the header of each rank. An error is raised in all
        ranks: ReplicaError where memory is short, DataMismatchError for bytes that arrived damaged,
        RankError in the others.
        """
        directory, rank, step = self._directory, self._control.world.rank, version.step

        def room() -> tuple[FileImage, dict[int, list[FileImage]]]:
            budget, made = self._partner.budget_bytes, dict[int, list[FileImage]]()
            for one in self._kept:
                size, header_size = sizes[one]
                image = directory.new_file(version, one, size, budget)
                made[one] = [image, _memory(header_size)]
            return directory.image(version, rank), made

        (own, incoming), _ = together(
            self._control, f"memory for step {step}", room, lambda _: None, deadline_s=_LIMIT_S
        )
        self._exchange([self._limit.limited(own), FileImage.of("header", [header])], incoming)

        def complete() -> None:
            for one, (image, described) in incoming.items():
                text = b"".join(bytes(view) for view in described.views(0, described.size_bytes))
                SaveHeader.parse(text, f"the replica of rank {one}").check(image)
                directory.complete(version, one, len(sizes), text)

        together(self._control, f"check of step {step}", complete, deadline_s=_LIMIT_S)

    def _exchange(
        self, own: Sequence[FileImage], incoming: Mapping[int, Sequence[FileImage]]
    ) -> None:
        """Send the files `own`, and fill the memory of those that come from other ranks."""
        world = self._control.world
        numbers = range(len(own))  # every rank sends as many files
        images = {
            number * world.size + rank: files[number]
            for rank, files in incoming.items()
            for number in numbers
        }
        held = HeldBytes(
            {number * world.size + world.rank: own[number] for number in numbers},
            {
                number * world.size + rank: [rank]
                for rank in range(world.size)
                for number in numbers
            },
        )
        wanted = [Range(number, 0, image.size_bytes) for number, image in images.items()]
        reader = Reader(self._transport, "all", deadline_s=_LIMIT_S)
        reader.read(images, MemoryReader([], "the memory of the partner", None), wanted, held)

    def close(self) -> None:
        """End the connections."""
        self._transport.close()


def _memory(size_bytes: int) -> FileImage:
    return FileImage.of("probe", [np.zeros(size_bytes, np.uint8)])
