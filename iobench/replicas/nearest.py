"""RestoreChoice: the newest checkpoint that all ranks can have, from memory and from storage."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from iobench.checkpoint.checksums import record_of
from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.piece_reader import HeldFiles
from iobench.checkpoint.ranked.dcp_files import INDEX, merged
from iobench.checkpoint.restore import Candidates, WrappedCandidates
from iobench.checkpoint.retention import readable_manifest
from iobench.checkpoint.tree_spec import json_text
from iobench.errors import IobenchError
from iobench.ranks.together import Together
from iobench.ranks.world import World
from iobench.remote.snapshot_memory import MemoryReader
from iobench.remote.tiered_store import MendedReader
from iobench.replicas.recovery import (
    MemoryCopy,
    RecoveryPlan,
    SaveHeader,
    StoredCopy,
    Version,
    recovery_plan,
)
from iobench.replicas.replicator import Replicator
from iobench.writers.base import Writer
from iobench.writers.copy_reader import CopyReader
from iobench.writers.image import FileImage

__all__ = ["Chosen", "ReplicaCandidates", "RestoreChoice", "manifest_of"]

_NAME = "replicas"
"""Of this source in Loaded."""


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


class ReplicaCandidates(WrappedCandidates):
    """`inner`, with the copy of `step` in the memory of nodes, of which this rank maps some files.

    The next copy of `step` is that of `inner`. With a `manifest` it is a checkpoint that was never
    committed: there is no other copy, and the nodes together have all of its files.
    """

    def __init__(
        self, inner: Candidates, step: int, held: HeldFiles, manifest: Manifest | None
    ) -> None:
        super().__init__(inner)
        self._step, self._held, self._manifest = step, held, manifest
        self._problem = ""  # why the copy in memory is left
        self._read: MendedReader | None = None

    def steps(self) -> list[int]:
        found = super().steps()
        return found if self._manifest is None else sorted({*found, self._step})

    def manifest(self, step: int, *, files: bool = True) -> Manifest:
        if step == self._step and self._manifest is not None:
            return self._manifest
        return super().manifest(step, files=files)

    def held(self) -> HeldFiles | None:
        """Return the files in memory, unless they are left."""
        return None if self._problem else self._held

    def reader(self, step: int, manifest: Manifest) -> CopyReader:
        stored = super().reader(step, manifest)
        if step != self._step or self._problem:
            return stored
        near = MemoryReader(self._held.images.values(), stored.location, stored)
        self._read = MendedReader(near, lambda: stored if self._manifest is None else None)
        return self._read

    def next_copy(self, step: int, problem: str) -> bool:
        if step != self._step or self._problem or self._manifest is not None:
            return super().next_copy(step, problem)
        self._problem = problem
        return True

    def sources(self, step: int) -> dict[str, str]:
        if step != self._step or self._read is None:
            return super().sources(step)
        if not self._problem:
            return self._read.sources(step, _NAME, str(self))
        message = f"step {step} is not read from {_NAME}: {self._problem}"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
        return {_NAME: self._problem, **(super().sources(step) or {str(self): "read"})}


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
        if plan is not None:
            for version, reason in plan.passed_over:
                self._warn(f"step {version.step} is passed over: {reason}")
        return plan

    def _from_memory(self, plan: RecoveryPlan) -> Chosen | None:
        """Return how to read `plan`; None, and without these copies, if some are damaged."""
        assert self.replicator is not None
        step, replicator = plan.version.step, self.replicator
        held, damaged = replicator.held(plan)
        if damaged:
            self._copies = [one for one in self._copies if one not in damaged]
            for one, reason in damaged.items():
                self._warn(
                    f"the memory of node {one.node} is not used for rank {one.rank}: {reason}"
                )
            return None
        described = None
        if not plan.stored:
            headers = replicator.headers(plan)
            _, ((manifest, index, lost), *_) = self.together(
                f"replicas of step {step}", lambda: self._described(plan, headers)
            )
            if lost:
                self.without(plan, lost)
                return None
            described = Manifest.parse(manifest.encode(), f"the replica of step {step}")
            images = {**held.images, INDEX: FileImage.of(INDEX, [index.encode()])}
            held = HeldFiles(images, held.holders)
        candidates = ReplicaCandidates(self.candidates, step, held, described)
        return Chosen(plan=plan, candidates=candidates)

    def _described(self, plan: RecoveryPlan, headers: Sequence[SaveHeader]) -> list[str] | None:
        """Return the manifest and the index, or why there are none, in rank 0."""
        if self.world.rank:
            return None
        try:
            manifest, index = manifest_of(plan, headers, self.writer)
        except IobenchError as error:
            return ["", "", str(error)]
        return [manifest.to_json().decode(), index, ""]

    def without(self, plan: RecoveryPlan, reason: str) -> None:
        """Choose no copy of this version in memory any more."""
        self._copies = [
            one
            for one in self._copies
            if one.version != plan.version or isinstance(one, StoredCopy)
        ]
        self._warn(f"the replicas of step {plan.version.step} are not used: {reason}")

    def _warn(self, text: str) -> None:
        if self.world.rank == 0:
            warnings.warn(text, RuntimeWarning, stacklevel=7)

    def version_of(self, step: int, chosen: Chosen | None) -> Version:
        """Return the version of `step`, which was loaded: the chosen one, or that of storage."""
        if chosen is not None and chosen.plan.version.step == step:
            return chosen.plan.version
        stored = [one.version for one in self._copies if isinstance(one, StoredCopy)]
        return next((one for one in stored if one.step == step), Version(0, step, ""))
