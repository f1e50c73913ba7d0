"""restore: the newest of the candidates that can be read, by one process or by all ranks."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.piece_reader import HeldFiles, PieceReader
from iobench.checkpoint.retention import by_age, damage_of, readable_manifest
from iobench.checkpoint.store import Checkpoints, store_at
from iobench.checkpoint.stored import StateReader, paths_elsewhere
from iobench.errors import (
    DataMismatchError,
    OptionError,
    RankError,
    TargetError,
    TransferError,
    UsageError,
)
from iobench.ranks.control import ALONE, Control
from iobench.ranks.exchange import Reader
from iobench.writers.base import CopyReader, StoredReader, Writer
from iobench.writers.config import writer_of
from iobench.writers.transfer import Transfer


class Candidates:
    """The checkpoints of a run, for one restore: those of `checkpoints`, which `writer` reads.

    `manifest` and `locate` are those of the nearest copy of a step that `next_copy` has not left.
    Here each checkpoint has one copy. `known` has serial numbers by step: the manifests of these
    need not be read.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        writer: Writer,
        known: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self._checkpoints, self.readers = checkpoints, checkpoints.readers
        self.writer, self._known = writer, known

    def __str__(self) -> str:
        return str(self._checkpoints)

    def steps(self) -> list[int]:
        return self._checkpoints.steps()

    def serials(self) -> dict[int, int]:
        return {**self._checkpoints.serials(), **self._known}

    def manifest(self, step: int, *, files: bool = True) -> Manifest:
        return self._checkpoints.manifest(step, files=files)

    def locate(self, step: int) -> str | Path:
        return self._checkpoints.locate(step)

    def reader(self, step: int, manifest: Manifest) -> CopyReader:
        """Return what reads this copy, which has this manifest; see CopyReader for the next one."""
        del manifest
        return StoredReader(self.writer, self.locate(step))

    def held(self, step: int) -> HeldFiles | None:
        """Return the files of this copy that are in the memory of ranks of the job."""
        del step
        return None

    def next_copy(self, step: int, problem: str) -> bool:
        """Leave a copy that cannot be read for the next one. False: there is no other.

        In a job, a call of all ranks.
        """
        del step, problem
        return False

    def sources(self, step: int) -> dict[str, str]:
        """Return what was read of each copy of a restored checkpoint, or why it was not.

        Empty where there is only one place. Warns (RuntimeWarning) of copies that were replaced.
        """
        del step
        return {}


class NearerCandidates(Candidates):
    """The candidates `inner`. A subclass adds nearer copies of one of them."""

    def __init__(self, inner: Candidates) -> None:
        super().__init__(inner, inner.writer)
        self._inner = inner

    def reader(self, step: int, manifest: Manifest) -> CopyReader:
        return self._inner.reader(step, manifest)

    def held(self, step: int) -> HeldFiles | None:
        return self._inner.held(step)

    def next_copy(self, step: int, problem: str) -> bool:
        return self._inner.next_copy(step, problem)

    def sources(self, step: int) -> dict[str, str]:
        return self._inner.sources(step)


OnCorrupt = Literal["raise", "previous"]

_MOST_CHANGES = 10  # checkpoints that a trainer may remove under a reader before it gives up


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Result of a restore: the step, the transfer of its tensors, and the damaged steps.

    `passed_over` maps the step of each damaged checkpoint to its error. The state is not kept here,
    because it may be as large as memory. With `tiers` or `replicate`, `sources` names the copy that
    it was read from, after the nearer ones that could not be read, each with the reason.
    """

    step: int
    transfer: Transfer
    passed_over: dict[int, str]
    sources: dict[str, str] = field(default_factory=dict)


def load_checkpoint(
    location: str | Path,
    step: int | Literal["latest"] = "latest",
    *,
    writer: Writer | str = "hybrid",
    on_corrupt: OnCorrupt = "raise",
    like: Any = None,
) -> Any:
    """Return the state of a checkpoint in `location`, also while a Checkpointer writes there.

    For evaluation and export: it takes no lock, asks no other rank and changes nothing. It reads
    checkpoints of one process and of several ranks. See `Checkpointer.load`.
    """
    chosen = writer_of(writer)
    stored = Candidates(store_at(location, chosen), chosen)
    return restore(stored, step, on_corrupt=on_corrupt, like=like)[0]


def restore(
    candidates: Candidates,
    step: int | Literal["latest"],
    *,
    on_corrupt: OnCorrupt = "raise",
    like: Any = None,
    offload: Callable[[Manifest], None] | None = None,
    ranks: Control = ALONE,
    reader: Reader | None = None,
) -> tuple[Any, Loaded]:
    """Return the state of the checkpoint `step`, or of the newest one, and how it was restored.

    Before the return every byte is compared with the manifest's checksums. What the nearest copy
    has damaged comes from the next one. A checkpoint that is damaged in all copies raises
    DataMismatchError; with `on_corrupt="previous"` the one before it is restored, with a
    RuntimeWarning. `like` is a state of the expected structure: a checkpoint of another model
    raises StateMismatchError before any tensor is read. Raises TargetError when there is no such
    checkpoint. One that a trainer removes or replaces meanwhile is not damaged: for "latest", the
    newest one is looked up again. `offload` lets an optimizer go on from the generation of a
    manifest.

    All `ranks` get the same checkpoint, which rank 0 chooses, or all fail. `reader` reads
    pieces together with the others.
    """
    if on_corrupt not in ("raise", "previous"):
        raise OptionError(f"on_corrupt={on_corrupt!r}: 'raise' or 'previous'")
    left = ranks.led(f"load of step {step}", lambda: _newest_first(candidates, step))
    gone = paths_elsewhere(ranks, like) if ranks.many else frozenset()
    world = ranks.world
    state_reader = StateReader(like=like, rank=world.rank, ranks=world.size, elsewhere=gone)
    passed_over: dict[int, str] = {}
    changes = 0
    while left:
        candidate, *others = left
        attempt = partial(_from_copy, candidates, candidate, state_reader, reader, offload, ranks)
        found = _from_copies(candidates, candidate, attempt)
        if found.restored is not None:
            state, transfer = found.restored
            sources = candidates.sources(candidate)
            return state, Loaded(
                step=candidate, transfer=transfer, passed_over=passed_over, sources=sources
            )
        damage = found.problem
        assert damage is not None
        now = None
        if found.is_only_copy:
            look = partial(_left_now, candidates, step, left, found.manifest)
            now = ranks.led("checkpoints now", look)
        if now is not None:
            changes += 1
            if changes == _MOST_CHANGES:
                fast = "checkpoints are removed faster than they are read"
                raise TargetError(f"{candidates}: {fast}; the trainer must keep more of them")
            left = [other for other in now if other not in passed_over]
            continue
        if on_corrupt == "raise":
            if others:
                damage.add_note(
                    f"the checkpoint before it is step {others[0]}; "
                    'on_corrupt="previous" restores the newest one that is not damaged'
                )
            raise damage
        passed_over[candidate] = str(damage)
        warnings.warn(f"step {candidate} is skipped: {damage}", RuntimeWarning, stacklevel=3)
        left = others
    raise DataMismatchError(f"{candidates}: every checkpoint is damaged: {passed_over}")


def _newest_first(candidates: Candidates, step: int | Literal["latest"]) -> list[int]:
    """Return `step` and the steps before it, newest first."""
    if step == "latest":
        found = by_age(candidates)
        if not found:
            raise TargetError(f"{candidates}: holds no complete checkpoint")
        return found[::-1]
    steps = candidates.steps()
    if step not in steps:
        raise TargetError(
            f"{candidates}: holds no checkpoint of step {step}; it holds {steps or 'none'}"
        )
    return [other for other in reversed(steps) if other <= step]


def _left_now(
    candidates: Candidates,
    step: int | Literal["latest"],
    left: list[int],
    manifest: Manifest | None,
) -> list[int] | None:
    """Return what is left if the first of `left` was removed or replaced, else None.

    That is so if its manifest is not `manifest` any more, which is None when its read failed. For
    "latest" the checkpoints are listed again.
    """
    present = candidates.steps()
    if left[0] in present and readable_manifest(candidates, left[0]) == manifest:
        return None
    if step == "latest":
        return _newest_first(candidates, step)
    if left[0] == step and step not in present:
        raise TargetError(f"{candidates}: step {step} was removed during the read")
    return [other for other in left if other in present]


def check_not_offloaded(manifest: Manifest, where: str) -> None:
    """Raise UsageError for a checkpoint whose optimizer is not in its files."""
    if manifest.pinned:
        raise UsageError(
            f"{where}: step {manifest.step} has its optimizer in {manifest.pinned[0].directory}; "
            "load it with Checkpointer(..., offload=AdamW.resume(parameters, directory))"
        )


class _Outcome(NamedTuple):
    """What all ranks got of one copy: the state of this rank, or what is wrong in one of them."""

    restored: tuple[Any, Transfer] | None
    problem: Exception | None
    manifest: Manifest | None
    is_only_copy: bool = True

    def told(self) -> list[Any]:
        """Return what the other ranks must know, as JSON."""
        saved = None if self.manifest is None else [self.manifest.serial, self.manifest.created_s]
        if self.problem is None:
            return [None, False, saved]
        return [str(self.problem), isinstance(self.problem, DataMismatchError), saved]


def _from_copies(candidates: Candidates, step: int, attempt: Callable[[], _Outcome]) -> _Outcome:
    """Restore a checkpoint from the nearest copy that can be read, by an `attempt` of each.

    Otherwise the outcome has the problem of the nearest copy, with those of the others as notes.
    Raises it if it is not damage.
    """
    first: Exception | None = None
    while True:
        where = candidates.locate(step)
        outcome = attempt()
        if outcome.problem is None:
            return outcome
        if first is None:
            first = outcome.problem
        else:
            first.add_note(f"the copy in {where}: {outcome.problem}")
        if not candidates.next_copy(step, str(outcome.problem)):
            break
    if not isinstance(first, DataMismatchError):
        raise first
    return outcome._replace(problem=first, is_only_copy=first is outcome.problem)


def _from_copy(
    candidates: Candidates,
    step: int,
    state_reader: StateReader,
    shared: Reader | None,
    offload: Callable[[Manifest], None] | None,
    ranks: Control,
) -> _Outcome:
    """Restore a checkpoint from its nearest copy, in all ranks or in none."""

    def work() -> _Outcome:
        manifest, reader = None, PieceReader(shared, candidates.held(step))
        try:
            if not ranks.leads:
                candidates.steps()  # a bucket must be listed to know where a checkpoint is
            manifest = candidates.manifest(step)
            if offload is None:
                check_not_offloaded(manifest, str(candidates))
            copy = candidates.reader(step, manifest)
            restored = state_reader.read(copy, f"{candidates}: step {step}", manifest, reader)
            if offload is not None:
                offload(manifest)
        except (DataMismatchError, TransferError) as error:
            problem = damage_of(error, candidates.locate(step)) or error
            if problem is not error:
                problem.__cause__ = error
            traceback.clear_frames(error.__traceback__)  # they hold the tensors that were read
            return _Outcome(None, problem, manifest)
        finally:
            reader.finish()
        return _Outcome(restored, None, manifest)

    own, found = ranks.together(f"restore of step {step}", work, _Outcome.told)
    failed = [(damaged, rank) for rank, (text, damaged, _) in enumerate(found) if text is not None]
    if failed:
        damaged, rank = min(failed)  # damage is what other ranks make of a failure of one
        text, problem = found[rank][0], own.problem
        if damaged and ranks.many:
            problem = DataMismatchError(f"{text} (found by rank {rank})")
        elif problem is None or isinstance(problem, DataMismatchError) is not damaged:
            problem = RankError(f"rank {rank}, restore of step {step}: {text}", ranks=[rank])
        return _Outcome(None, problem, own.manifest)
    if any(saved != found[0][2] for _, _, saved in found):
        text = f"{candidates}: the ranks see different checkpoints of step {step}"
        return _Outcome(None, DataMismatchError(text), own.manifest)
    return own
