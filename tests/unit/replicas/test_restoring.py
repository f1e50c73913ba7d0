"""What a load chooses: from the copies that nodes hold and storage."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from iobench import Checkpointer
from iobench.checkpoint.manifest import FileRecord
from iobench.checkpoint.piece_reader import HeldFiles
from iobench.checkpoint.ranked.messages import Part
from iobench.checkpoint.ranked.plan import data_file
from iobench.checkpoint.restore import Candidates, restore
from iobench.checkpoint.store import Checkpoints, DirectoryStore
from iobench.errors import DataMismatchError, TargetError
from iobench.ranks.control import ALONE
from iobench.replicas.directory import SaveHeader, Version
from iobench.replicas.nearest import ReplicaCandidates
from iobench.replicas.replicator import MemoryCopy, RecoveryPlan, Replicator
from iobench.writers.buffered import BufferedWriter


class _Attempt:
    """A manifest, as far as a choice needs it."""

    def __init__(self, attempt: str) -> None:
        self.attempt = attempt


class _Storage:
    """Storage with steps 10 and 20, whose serial numbers are 1 and 2."""

    def __init__(self, attempts: dict[int, str]) -> None:
        self.attempts = attempts

    def serials(self) -> dict[int, int]:
        return {10: 1, 20: 2}

    readers = 1

    def steps(self) -> list[int]:
        return [10, 20]

    def locate(self, step: int) -> Path:
        if step not in self.steps():
            raise TargetError(f"no checkpoint of step {step}")
        return Path(f"/runs/step-{step}")

    def manifest(self, step: int, *, files: bool = True) -> _Attempt:
        assert not files
        if step not in self.attempts:
            raise DataMismatchError("damaged")
        return _Attempt(self.attempts[step])


class _Memory:
    """The memory of two nodes, with some versions of two ranks."""

    def __init__(self, *versions: Version) -> None:
        self.versions = versions

    def copies(self) -> list[MemoryCopy]:
        return [MemoryCopy(one, rank, 2, rank) for one in self.versions for rank in (0, 1)]

    def held(self, plan: RecoveryPlan) -> tuple[HeldFiles, dict[MemoryCopy, str]]:
        del plan
        return HeldFiles({}, {}), {}

    def headers(self, plan: RecoveryPlan) -> list[SaveHeader]:
        return [
            SaveHeader(
                part=Part(
                    rank=rank,
                    file=FileRecord(path=data_file(rank), size_bytes=0, pieces=()),
                    values=(),
                    skeleton={"w": 1} if rank == 0 else None,
                    own=[],
                ),
                created_s=5.0,
                table="{}",
            )
            for rank in sorted(plan.holders)
        ]


def _restoring(memory: _Memory | None = None) -> ReplicaCandidates:
    storage = _Storage({10: "a", 20: "b"})
    made = ReplicaCandidates(
        Candidates(cast(Checkpoints, storage), BufferedWriter()),
        ranks=ALONE,
        replicator=cast(Replicator, memory or _Memory()),
    )
    made.look("latest")
    return made


def _plan(memory: _Memory | None = None) -> RecoveryPlan:
    plan = _restoring(memory).plan
    assert plan is not None
    return plan


def test_without_replicas_the_newest_checkpoint_is_read_as_before() -> None:
    """Nothing is in memory. What comes after the version that was loaded is dropped from it."""
    assert _plan().version.step == 20
    restoring = _restoring()
    assert restoring.held(20) is None
    assert restoring.version_of(10) == Version(1, 10, "")
    assert restoring.version_of(5) == Version(0, 5, "")


def test_the_same_save_in_memory_and_on_storage() -> None:
    """The attempt tells: bytes of another save of that step are never mixed in."""
    same = _plan(_Memory(Version(2, 20, "b")))
    assert (same.stored, sorted(same.holders)) == (True, [0, 1])
    for attempt in ("another", "zzz"):
        other = _plan(_Memory(Version(2, 20, attempt)))
        assert (other.version.step, other.stored, other.holders) == (20, True, {})


def test_a_save_that_only_memory_has() -> None:
    """It is a checkpoint, which storage need not know, until its bytes prove damaged."""
    restoring = _restoring(_Memory(Version(3, 30, "c")))
    assert (restoring.steps(), restoring.serials()) == ([10, 20, 30], {10: 1, 20: 2, 30: 3})
    manifest = restoring.manifest(30)
    assert (manifest.serial, manifest.created_s, manifest.world_size) == (3, 5.0, 2)
    assert restoring.reader(30, manifest).location == restoring.locate(30) == "replicas"
    with pytest.warns(RuntimeWarning, match="the replicas of step 30 are not used: a wrong bit"):
        assert not restoring.next_copy(30, "a wrong bit")
    assert (restoring.steps(), restoring.held(30)) == ([10, 20], None)
    assert restoring.version_of(20) == Version(2, 20, "")


def test_a_damaged_manifest_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    """The newest checkpoint is the one to restore, though its age cannot be read."""
    with Checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save({"step": step}, step)
    (tmp_path / "step-2" / "manifest.json").write_text("{}")
    writer = BufferedWriter()
    stored = Candidates(DirectoryStore(tmp_path), writer, {1: 1})
    candidates = ReplicaCandidates(stored, ranks=ALONE, replicator=cast(Replicator, _Memory()))
    candidates.look("latest")
    with pytest.raises(DataMismatchError, match="step-2"):
        restore(candidates, "latest")
    with pytest.warns(RuntimeWarning, match="step 2 is skipped"):
        assert restore(candidates, "latest", on_corrupt="previous")[0] == {"step": 1}
