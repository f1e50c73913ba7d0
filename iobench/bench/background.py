"""Background: another process restores an earlier checkpoint while a save or restore is timed.

So does an evaluation job that starts while the training saves. The earlier checkpoint has the same
files, and bytes of its own. It stays in the target from its first use to the end of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial

from iobench.bench.contenders.base import Contender, WriterContender
from iobench.bench.contenders.peer import PeerContender
from iobench.bench.plan import Plan
from iobench.bench.processes.job import CheckpointRef, Job, Looped, manifest, stored_files
from iobench.bench.ranks.group import Executor
from iobench.bench.ranks.setup import reader_setup
from iobench.bench.ranks.start import LocalRanks
from iobench.bench.targets.base import OpenTarget
from iobench.errors import JobError
from iobench.results.records import BackgroundRestores
from iobench.writers.registry import make

_WARM_UP = "warm-up-background"


During = Callable[[float, float], BackgroundRestores]
"""Returns what was restored from a time of time.perf_counter on, for so many seconds."""


def during(
    writer: str, ended: Sequence[Looped | JobError], began_s: float, elapsed_s: float
) -> BackgroundRestores:
    """Return what `writer` restored from `began_s` on, for `elapsed_s`; `ended` has the result."""
    (one,) = ended
    if isinstance(one, JobError):
        return BackgroundRestores(
            writer=writer,
            restores=0,
            bytes=0,
            lead_s=0.0,
            lag_s=0.0,
            reading_s=0.0,
            resident_fraction=0.0,
            from_storage=None,
            mismatches=0,
            error=str(one),
        )
    until_s = began_s + elapsed_s
    inside_s = [max(0.0, min(end, until_s) - max(begin, began_s)) for begin, end in one.spans]
    parts = [
        inside / (end - begin)
        for inside, (begin, end) in zip(inside_s, one.spans, strict=True)
        if inside
    ]
    all_bytes = one.size_bytes * len(one.spans)
    return BackgroundRestores(
        writer=writer,
        restores=len(parts),
        bytes=round(one.size_bytes * sum(parts)),
        lead_s=began_s - one.spans[0][0],
        lag_s=one.spans[-1][1] - until_s,
        reading_s=sum(inside_s),
        resident_fraction=one.resident_fraction,
        from_storage=None if one.read_bytes is None else one.read_bytes / all_bytes,
        mismatches=one.mismatches,
    )


class Background(AbstractContextManager["Background"]):
    """The process of one target. It is killed at the end of the `with` block or of this process."""

    def __init__(self, plan: Plan, location: str | None, target: OpenTarget) -> None:
        """`location` is what the variants of the target have in `target`."""
        self._plan, self._scratch = plan, target.scratch
        self._maker = next(
            plan.contenders.index(one.contender)
            for one in plan.variants
            if one.background and one.target == location
        )
        self._readers = list(map(_reader, plan.contenders))
        self._labels = list(dict.fromkeys(one.label for one in self._readers))
        writers, warm_up = ",".join(self._labels), self._scratch.locate(_WARM_UP)
        self._ranks = LocalRanks(
            2, temporary=self._scratch.directory, name="the background process"
        )
        self._group = Executor(
            None, self._ranks, lambda members: reader_setup(plan, members, writers, warm_up)
        )
        self._made = False

    def __exit__(self, *_: object) -> None:
        self._ranks.stop()

    @contextmanager
    def restoring(self, contender: int, shape: int) -> Iterator[During]:
        """Restore the earlier checkpoint, from before the block until after it.

        What it yields is called after the block.

        `contender` and `shape` are indices of the plan's. A peer has a format of its own, so
        `buffered` restores next to it, in a bucket `s3`. Raises JobError if no restore can begin.
        If one fails later, the result says so.
        """
        if not self._made:
            self._make()
        ref, self._made = self._ref(contender, shape), False
        with self._group.looping(ref) as ended:
            yield partial(during, self._readers[contender].label, ended)
        self._made = not isinstance(ended[0], JobError)  # only that process knows the right bytes

    def _make(self) -> None:
        """Save one checkpoint of each shape. All of them are there, or none is used."""
        for shape, files in enumerate(self._plan.files_of_jobs[0]):
            self._scratch.remove(_name(shape))
            self._group.ask(1, partial(Job.prepare, shape=shape, checkpoint=()))
            with self._scratch.staged(_name(shape)) as staged:
                ref = replace(self._ref(self._maker, shape), directory=str(staged.directory))
                done = self._group.ask(1, partial(Job.save, ref=ref))
                text = manifest(
                    0, self._readers[self._maker], stored_files([files], done, apart=False)
                )
                staged.publish(map(str.encode, text))
        self._scratch.remove(_WARM_UP)
        self._made = True

    def _ref(self, contender: int, shape: int) -> CheckpointRef:
        number = self._labels.index(self._readers[contender].label)
        directory = self._scratch.locate(_name(shape))
        return CheckpointRef(contender=number, shape=shape, directory=directory)


def _name(shape: int) -> str:
    return f"earlier-{shape}"


def _reader(contender: Contender) -> WriterContender:
    """Return what restores in the background of a contender; a peer has a format of its own."""
    if isinstance(contender, WriterContender):
        return WriterContender(contender.writer)
    in_bucket = isinstance(contender, PeerContender) and "file" not in contender.peer.schemes
    return WriterContender(make("s3" if in_bucket else "buffered"))
