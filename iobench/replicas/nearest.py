"""ReplicaCandidates: a checkpoint in the memory of nodes, with storage for what they lack."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from iobench.checkpoint.checksums import record_of
from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.ranked.dcp_files import INDEX, merged
from iobench.checkpoint.ranked.plan import data_file
from iobench.checkpoint.restore import Candidates, WrappedCandidates
from iobench.checkpoint.retention import readable_manifest
from iobench.checkpoint.tree_spec import json_text
from iobench.errors import DataMismatchError, IobenchError, ReplicaError
from iobench.ranks.together import Together
from iobench.ranks.world import World
from iobench.replicas.fetch import Fetched, Fetcher
from iobench.replicas.protocol import (
    MemoryCopy,
    RecoveryPlan,
    SaveHeader,
    StoredCopy,
    Version,
    recovery_plan,
)
from iobench.replicas.replicator import Replicator
from iobench.units import MIB
from iobench.writers.base import Writer
from iobench.writers.blocks.workers import Blocks
from iobench.writers.copy_reader import CopyReader
from iobench.writers.image import FileImage, Ranges
from iobench.writers.source import Source
from iobench.writers.transfer import Meter, Transfer

__all__ = ["Chosen", "ReplicaCandidates", "RestoreChoice", "headers_of", "manifest_of"]


def headers_of(fetcher: Fetcher, ranks: int) -> list[SaveHeader]:
    """Return the headers of all ranks that saved. Raises ReplicaError."""
    return [
        SaveHeader.parse(fetcher.part(rank).header, f"the replica of rank {rank}")
        for rank in range(ranks)
    ]


def manifest_of(
    plan: RecoveryPlan, headers: Sequence[SaveHeader], writer: Writer
) -> tuple[Manifest, str]:
    """Return the manifest and the index of a checkpoint that only memory has."""
    from iobench._version import __version__

    parts = [header.part for header in headers]
    index = f'{{"skeleton":{json_text(merged(parts))},"tensors":{headers[0].table}}}'
    image = FileImage.of(INDEX, [index.encode()])
    record = record_of(image, [("", image.size_bytes)])
    manifest = Manifest(
        step=plan.version.step,
        created_s=headers[0].created_s,
        world_size=len(parts),
        iobench=__version__,
        writer={"name": writer.name, "options": writer.options.to_dict()},
        format="dcp",
        files=(*(part.file for part in parts), record),
        serial=plan.version.serial,
    )
    return manifest, index


_AT_ONCE = 16 * MIB
"""Bytes after which those that wait for a part of a file get it."""


class ReplicaCandidates(WrappedCandidates):
    """`inner`, with the step of `plan`, whose files are read from memory as far as it has them.

    `manifest` and `texts`, whole files by name, describe a checkpoint that was never committed.
    `notes` lists the sources that were replaced.
    """

    def __init__(
        self,
        inner: Candidates,
        plan: RecoveryPlan,
        fetcher: Fetcher,
        manifest: Manifest | None,
        texts: dict[str, bytes],
    ) -> None:
        super().__init__(inner)
        self._step, self._manifest, self._texts = plan.version.step, manifest, texts
        self._fetcher = fetcher
        self._names = {data_file(rank): rank for rank in range(plan.ranks or 0)}
        self.notes: list[str] = []

    def steps(self) -> list[int]:
        return sorted({*super().steps(), self._step})

    def manifest(self, step: int, *, files: bool = True) -> Manifest:
        if step == self._step and self._manifest is not None:
            return self._manifest
        return super().manifest(step, files=files)

    def reader(self, step: int, manifest: Manifest) -> CopyReader:
        stored = super().reader(step, manifest)
        if step != self._step:
            return stored
        return _ReplicaReader(
            stored,
            self._fetcher,
            self._names,
            self._texts,
            self.notes,
            is_stored=self._manifest is None,
        )

    def close(self) -> None:
        """End the connections to the agents."""
        self._fetcher.close()


class _ReplicaReader:
    """The copies of a checkpoint in the memory of the nodes, and `stored` for what they lack.

    `names` maps the files in memory to the ranks that saved them, `texts` has whole files.
    """

    def __init__(
        self,
        stored: CopyReader,
        fetcher: Fetcher,
        names: dict[str, int],
        texts: dict[str, bytes],
        notes: list[str],
        *,
        is_stored: bool,
    ) -> None:
        self._stored, self._fetcher, self._names, self._texts = stored, fetcher, names, texts
        self.name, self.direct, self.location = stored.name, stored.direct, stored.location
        self._is_stored, self._notes = is_stored, notes
        self._lock = threading.Lock()

    def read(self, image: FileImage, ranges: Ranges | None = None) -> Transfer:
        ranges = [(0, image.size_bytes)] if ranges is None else ranges
        if image.path in self._texts:
            return self._text(image, ranges)
        if image.path not in self._names:
            return self._stored.read(image, ranges)
        meter, rank = Meter(), self._names[image.path]
        missing: list[tuple[int, int]] = []
        with self._lock, meter.phase("memory"):
            for start, stop in Blocks.of(ranges, _AT_ONCE):
                missing += self._fetch(rank, image, start, stop, meter)
        if missing and not self._is_stored:
            raise DataMismatchError(
                f"step at {self.location}: no copy of rank {rank} has valid bytes {missing[:3]}: "
                f"{'; '.join(self._notes[-3:])}"
            )
        if missing:
            meter.fell_back("memory", "storage", f"bytes of rank {rank}")
            done = self._stored.read(image, missing)
            meter.add(done, done.phases_s)
        size = sum(stop - start for start, stop in ranges)
        return meter.transfer(self.name, "read", size, durable=True)

    def read_again(self, image: FileImage, start: int, stop: int, piece: str) -> bool:
        return self._stored.read_again(image, start, stop, piece)

    def open_source(self, target: str) -> Source:
        return self._stored.open_source(target)

    def _fetch(
        self, rank: int, image: FileImage, start: int, stop: int, meter: Meter
    ) -> list[tuple[int, int]]:
        """Fill bytes of the image from memory; return the ranges that are still missing."""
        missing: list[tuple[int, int]] = []
        at = start
        for view in image.views(start, stop):
            end = at + len(view)
            try:
                found = self._fetcher.fetch(rank, at, view)
            except ReplicaError as error:
                self._notes.append(str(error))
                found = Fetched(missing=[(at, end)])
            for kind, count in found.read_bytes.items():
                meter.count(f"memory ({kind})", count)
            self._notes += found.notes
            for begin, after in [*found.missing, (end, end)]:
                if begin > at:
                    image.filled(at, begin)
                at = after
            missing += found.missing
            at = end
        return missing

    def _text(self, image: FileImage, ranges: Ranges) -> Transfer:
        meter, text = Meter(), np.frombuffer(self._texts[image.path], np.uint8)
        for start, stop in ranges:
            image.scatter(start, stop, text[start:stop])
            image.filled(start, stop)
            meter.count("memory (own)", stop - start)
        size = sum(stop - start for start, stop in ranges)
        return meter.transfer(self.name, "read", size, durable=True)


_Copies = list[MemoryCopy | StoredCopy]


@dataclass(kw_only=True)
class Chosen:
    """A version to restore, and the candidates that have it."""

    plan: RecoveryPlan
    candidates: Candidates

    @property
    def only_in_memory(self) -> bool:
        """Whether storage does not have it."""
        return not self.plan.stored

    def close(self) -> list[str]:
        """End the connections; return notes about sources that were replaced."""
        if not isinstance(self.candidates, ReplicaCandidates):
            return []
        self.candidates.close()
        return self.candidates.notes


@dataclass(kw_only=True)
class RestoreChoice:
    """Finds the newest version that all ranks can have. Its calls are calls of all ranks.

    `candidates` are those on storage. `serials` returns their serial numbers, in rank 0; `writer`
    is that of the saves.
    """

    world: World
    together: Together
    candidates: Candidates
    writer: Writer
    serials: Callable[[], Mapping[int, int]] | None
    replicator: Replicator | None
    _copies: _Copies = field(default_factory=list)

    def look(self, step: int | Literal["latest"]) -> None:
        """Ask all nodes and storage what there is."""
        memory = self.replicator.copies() if self.replicator else []
        held = {copy.version.step for copy in memory}

        def stored() -> list[Any] | None:
            if self.serials is None:
                return None
            found = []
            for at, serial in self.serials().items():
                manifest = (
                    readable_manifest(self.candidates, at, files=False) if at in held else None
                )
                found.append([serial, at, manifest.attempt if manifest else ""])
            return found

        _, (versions, *_) = self.together(f"sources of step {step}", stored)
        committed = {(serial, at): attempt for serial, at, attempt in versions if attempt}
        memory = [  # without another save of a step that was then committed
            one
            for one in memory
            if committed.get(one.version[:2], one.version.attempt) == one.version.attempt
        ]
        copies: _Copies = [*memory, *(StoredCopy(Version(*one)) for one in versions)]
        self._copies = [one for one in copies if step in ("latest", one.version.step)]

    def choose(self) -> Chosen | None:
        """Return the newest version; None when no version is complete."""
        while (plan := self._plan()) is not None:
            if not plan.holders:
                return Chosen(plan=plan, candidates=self.candidates)
            chosen = self._from_memory(plan)
            if chosen is not None:
                return chosen
        return None

    def _plan(self) -> RecoveryPlan | None:
        plan = recovery_plan(self._copies)
        if plan is not None and self.world.rank == 0:
            for version, reason in plan.passed_over:
                warnings.warn(
                    f"step {version.step} is passed over: {reason}", RuntimeWarning, stacklevel=6
                )
        return plan

    def _from_memory(self, plan: RecoveryPlan) -> Chosen | None:
        """Return how to read `plan`; None, and without these copies, if an agent is lost."""
        assert self.replicator is not None
        fetcher = self.replicator.fetcher(plan)
        step = plan.version.step
        described, texts = None, {}
        try:
            if not plan.stored:
                _, ((manifest, index, lost), *_) = self.together(
                    f"replicas of step {step}", lambda: self._described(plan, fetcher)
                )
                if lost:
                    self.without(plan, lost)
                    fetcher.close()
                    return None
                described = Manifest.parse(manifest.encode(), f"the replica of step {step}")
                texts = {INDEX: index.encode()}
        except BaseException:
            fetcher.close()
            raise
        candidates = ReplicaCandidates(self.candidates, plan, fetcher, described, texts)
        return Chosen(plan=plan, candidates=candidates)

    def _described(self, plan: RecoveryPlan, fetcher: Fetcher) -> list[str] | None:
        if self.world.rank:
            return None
        try:
            headers = headers_of(fetcher, plan.ranks or 0)
            manifest, index = manifest_of(plan, headers, self.writer)
        except (ReplicaError, IobenchError) as error:
            return ["", "", str(error)]
        return [manifest.to_json().decode(), index, ""]

    def without(self, plan: RecoveryPlan, reason: str) -> None:
        """Choose no copy of this version in memory any more."""
        self._copies = [
            one
            for one in self._copies
            if one.version != plan.version or isinstance(one, StoredCopy)
        ]
        if self.world.rank == 0:
            warnings.warn(
                f"the replicas of step {plan.version.step} are not used: {reason}",
                RuntimeWarning,
                stacklevel=6,
            )

    def version_of(self, step: int, chosen: Chosen | None) -> Version:
        """Return the version of `step`, which was loaded: the chosen one, or that of storage."""
        if chosen is not None and chosen.plan.version.step == step:
            return chosen.plan.version
        stored = [one.version for one in self._copies if isinstance(one, StoredCopy)]
        return next((one for one in stored if one.step == step), Version(0, step, ""))
