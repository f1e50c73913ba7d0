"""RestoreChoice: chooses with all ranks what is restored, and from where."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from iobench.checkpoint.load.candidates import Candidates
from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.order import readable_manifest
from iobench.checkpoint.ranked.index import INDEX
from iobench.errors import IobenchError, ReplicaError
from iobench.ranks.together import Together
from iobench.ranks.world import World
from iobench.replicas.fetch import Fetcher
from iobench.replicas.nearest import ReplicaCandidates, headers_of, manifest_of
from iobench.replicas.recovery import (
    MemoryCopy,
    RecoveryPlan,
    StoredCopy,
    Version,
    recovery_plan,
)
from iobench.replicas.replicator import Replicator
from iobench.writers.base import Writer

__all__ = ["Chosen", "RestoreChoice"]

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
