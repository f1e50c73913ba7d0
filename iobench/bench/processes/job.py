"""Job: one process's part in a run: its own files, its own memory, and every contender.

A run of one process has its only job in that process; otherwise each job has a child process (see
`ProcessGroup`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from iobench import linux
from iobench.bench.contenders.base import Contender
from iobench.bench.counters.monitor import Usage
from iobench.bench.data.replay import Replay
from iobench.bench.targets.base import Location
from iobench.results.records import Verified
from iobench.workloads import FileSpec
from iobench.writers.transfer import Transfer

__all__ = ["CheckpointRef", "CheckpointSizes", "Done", "Job", "JobSetup", "own_name"]


@dataclass(frozen=True, kw_only=True)
class JobSetup:
    """What a job is made from. `files` are those of each shape of the run.

    With a `number`, its files are in a directory of that number below each checkpoint's.
    """

    contenders: tuple[Contender, ...]
    files: tuple[tuple[FileSpec, ...], ...]
    pool_bytes: int
    seed: int
    crc: bool
    number: int | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointRef:
    """A checkpoint that a job moves: whose and in which shape, by position, and where it is."""

    contender: int
    shape: int
    directory: Location


@dataclass(frozen=True, kw_only=True)
class CheckpointSizes:
    """Bytes of a job's checkpoint as our formats write it, and what each kind of restore brings."""

    saved: int
    restored: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a job's save or restore came to: its files' transfers, and when the last one ended.

    `at_s` is of time.perf_counter, which all processes share. `usage` is that of another process
    than the one that asked; that one counts its own.
    """

    transfers: tuple[Transfer, ...]
    at_s: float
    notes: tuple[str, ...]
    usage: Usage = field(default_factory=Usage)


class Job:
    """Prepares, saves, restores and verifies; everything but `save` and `restore` is untimed.

    Replays of all shapes share one pool: only one of them is in use at a time.
    """

    def __init__(self, setup: JobSetup) -> None:
        self.contenders = setup.contenders
        self._number = setup.number
        pool = Replay.pool_for(setup.files, pool_bytes=setup.pool_bytes, seed=setup.seed)
        self.replays = [
            Replay(files, pool_bytes=setup.pool_bytes, seed=setup.seed, crc=setup.crc, pool=pool)
            for files in setup.files
        ]

    def sizes(self, shape: int, subsets: Sequence[float | None]) -> CheckpointSizes:
        """Return the sizes: the files are written to nowhere, and each of `subsets` is chosen."""
        replay, restored = self.replays[shape], []
        for subset in subsets:
            replay.want(subset)
            restored.append(sum(replay.restored_bytes))
        return CheckpointSizes(saved=replay.size_bytes(), restored=tuple(restored))

    def warm_up(self, directory: Location) -> None:
        """Do each contender's first-use work; an error there is raised again by its save."""
        for one in self.contenders:
            with contextlib.suppress(Exception):
                one.warm_up(self._own(directory))

    def prepare(self, shape: int) -> None:
        """Make the bytes of the next checkpoint."""
        self.replays[shape].want(None)
        self.replays[shape].prepare()

    def save(self, ref: CheckpointRef) -> Done:
        """Save every file, each durable but for its directory's entry."""
        one, replay = self.contenders[ref.contender], self.replays[ref.shape]
        return self._done(one, replay, one.save(replay, self._own(ref.directory)))

    def scrub(self, shape: int, subset: float | None) -> None:
        """Change all memory that the next restore will fill, which brings `subset`."""
        self.replays[shape].want(subset)
        self.replays[shape].scrub()

    def restore(self, ref: CheckpointRef) -> Done:
        """Restore what `scrub` said."""
        one, replay = self.contenders[ref.contender], self.replays[ref.shape]
        return self._done(one, replay, one.restore(replay, self._own(ref.directory)))

    def verify(self, ref: CheckpointRef) -> Verified:
        """Compare the restored tensors with the saved ones, and free them."""
        one, replay = self.contenders[ref.contender], self.replays[ref.shape]
        verified = one.verify(replay, self._own(ref.directory))
        linux.trim_heap()  # memory that this one freed is no help to the next one
        return verified

    def _own(self, directory: Location) -> Location:
        return directory if self._number is None else f"{directory}/{own_name(self._number)}"

    @staticmethod
    def _done(one: Contender, replay: Replay, transfers: Sequence[Transfer]) -> Done:
        at_s = time.perf_counter()
        return Done(transfers=tuple(transfers), at_s=at_s, notes=one.notes(replay))


def own_name(number: int) -> str:
    """The directory, below a checkpoint's, of the job of that number."""
    return f"job-{number}"
