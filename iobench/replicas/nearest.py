"""ReplicaCandidates: the newest checkpoint that all ranks can have, from memory and storage."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from iobench.checkpoint.checksums import record_of
from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.piece_reader import HeldFiles
from iobench.checkpoint.ranked.dcp_files import INDEX, merged
from iobench.checkpoint.restore import Candidates, NearerCandidates
from iobench.checkpoint.retention import readable_manifest
from iobench.checkpoint.state_tree import json_text
from iobench.errors import IobenchError
from iobench.ranks.control import Control
from iobench.remote.snapshot_memory import MemoryReader
from iobench.remote.tiered_store import MendedReader
from iobench.replicas.directory import SaveHeader, Version
from iobench.replicas.replicator import MemoryCopy, RecoveryPlan, Replicator, recovery_plan
from iobench.writers.base import CopyReader, Writer
from iobench.writers.image import FileImage

_NAME = "replicas"
"""Of this source in Loaded."""


def manifest_of(
    plan: RecoveryPlan, headers: Sequence[SaveHeader], writer: Writer
) -> tuple[str, str]:
    """Return the manifest and the index of a checkpoint that only memory has, as JSON."""
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
    return manifest.to_json().decode(), index


class ReplicaCandidates(NearerCandidates):
    """`inner`, with the newest version that all ranks can have, from the memory of nodes.

    Of `plan`, this version, each rank maps the files that its node has. What they have damaged, and
    what no node has, comes from `inner`. It may be a save that was never committed: then there is
    no other copy, and the nodes together have all of its files. `look` and `next_copy` are calls of
    all ranks. In rank 0 `inner` has all serial numbers.
    """

    def __init__(self, inner: Candidates, *, ranks: Control, replicator: Replicator) -> None:
        super().__init__(inner)
        self._ranks, self._replicator = ranks, replicator
        self._memory: list[MemoryCopy] = []
        self._stored: list[Version] = []
        self._may_drop = False
        self.plan: RecoveryPlan | None = None
        """The version, after `look`; None: no version is complete."""
        self._held: HeldFiles | None = None
        self._manifest: Manifest | None = None  # of a save that was never committed
        self._problem = ""  # why the copy in memory is left
        self._read: MendedReader | None = None

    def steps(self) -> list[int]:
        return sorted({*super().steps(), *self._only_in_memory()})

    def serials(self) -> dict[int, int]:
        return {**super().serials(), **self._only_in_memory()}

    def _only_in_memory(self) -> dict[int, int]:
        """Return the serial number of the version by its step, unless it is stored."""
        one = self._manifest
        return {} if one is None else {one.step: one.serial}

    def manifest(self, step: int, *, files: bool = True) -> Manifest:
        if self._manifest is not None and self._manifest.step == step:
            return self._manifest
        return super().manifest(step, files=files)

    def locate(self, step: int) -> str | Path:
        return _NAME if step in self._only_in_memory() else super().locate(step)

    def held(self, step: int) -> HeldFiles | None:
        found = self._of_memory(step)
        return super().held(step) if found is None or self._problem else found

    def _of_memory(self, step: int) -> HeldFiles | None:
        """Return the files of `step` in memory; None for another step."""
        return self._held if self.plan is not None and self.plan.version.step == step else None

    def reader(self, step: int, manifest: Manifest) -> CopyReader:
        held = self._of_memory(step)
        if held is None or self._problem:
            return super().reader(step, manifest)
        stored = None if self._manifest is not None else super().reader(step, manifest)
        near = MemoryReader(held.images.values(), self.locate(step), stored)
        self._read = MendedReader(near, lambda: stored)
        return self._read

    def next_copy(self, step: int, problem: str) -> bool:
        if self._of_memory(step) is None or self._problem:
            return super().next_copy(step, problem)
        if self._manifest is None:
            self._problem = problem
            return True
        if self._may_drop:
            self._drop(problem)
            self._choose()
        return False

    def sources(self, step: int) -> dict[str, str]:
        if self._of_memory(step) is None or self._read is None:
            return super().sources(step)
        if not self._problem:
            return self._read.sources(step, _NAME, str(self))
        message = f"step {step} is not read from {_NAME}: {self._problem}"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
        return {_NAME: self._problem, **(super().sources(step) or {str(self): "read"})}

    def look(self, step: int | Literal["latest"]) -> bool:
        """Ask all nodes and storage what there is, and choose the newest version.

        Return whether nodes have files of it in memory.
        """
        memory = self._replicator.copies()
        held = {copy.version.step for copy in memory}

        def committed_here() -> list[Any]:
            found = []
            for at, serial in self._inner.serials().items():
                manifest = readable_manifest(self._inner, at, files=False) if at in held else None
                found.append([serial, at, manifest.attempt if manifest else ""])
            return found

        versions = self._ranks.led(f"sources of step {step}", committed_here)
        committed = {(serial, at): attempt for serial, at, attempt in versions if attempt}
        memory = [  # without another save of a step that was then committed
            one
            for one in memory
            if committed.get(one.version[:2], one.version.attempt) == one.version.attempt
        ]
        self._memory = [one for one in memory if step in ("latest", one.version.step)]
        stored = [Version(*one) for one in versions]
        self._stored = [one for one in stored if step in ("latest", one.step)]
        self._may_drop = step == "latest"
        self._choose()
        return self._held is not None

    def _choose(self) -> None:
        while True:
            self.plan = plan = recovery_plan(self._memory, self._stored)
            self._held = self._manifest = None
            for version, reason in plan.passed_over if plan is not None else ():
                self._warn(f"step {version.step} is passed over: {reason}")
            if plan is None or not plan.holders or self._hold(plan):
                return

    def _hold(self, plan: RecoveryPlan) -> bool:
        """Map the files of `plan`. False, and without these copies, if some are damaged."""
        step, replicator = plan.version.step, self._replicator
        held, damaged = replicator.held(plan)
        if damaged:
            self._memory = [one for one in self._memory if one not in damaged]
            for one, reason in damaged.items():
                self._warn(
                    f"the memory of node {one.node} is not used for rank {one.rank}: {reason}"
                )
            return False
        if not plan.stored:
            headers = replicator.headers(plan)
            try:
                manifest, index = self._ranks.led(
                    f"replicas of step {step}", lambda: manifest_of(plan, headers, self.writer)
                )
            except IobenchError as error:
                self._ranks.check()
                self._drop(str(error))
                return False
            self._manifest = Manifest.parse(manifest.encode(), f"the replica of step {step}")
            images = {**held.images, INDEX: FileImage.of(INDEX, [index.encode()])}
            held = HeldFiles(images, held.holders)
        self._held = held
        return True

    def _drop(self, reason: str) -> None:
        """Choose no copy of this version in memory any more."""
        assert self.plan is not None
        version = self.plan.version
        self._memory = [one for one in self._memory if one.version != version]
        self._warn(f"the replicas of step {version.step} are not used: {reason}")

    def _warn(self, text: str) -> None:
        if self._ranks.leads:
            warnings.warn(text, RuntimeWarning, stacklevel=7)

    def version_of(self, step: int) -> Version:
        """Return the version of `step`, which was loaded: the chosen one, or that of storage."""
        if self.plan is not None and self.plan.version.step == step:
            return self.plan.version
        return next((one for one in self._stored if one.step == step), Version(0, step, ""))
