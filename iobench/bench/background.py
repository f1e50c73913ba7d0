"""Background: another process restores an earlier checkpoint while a save or restore is timed.

So does an evaluation job that starts while the training saves. The earlier checkpoint has the same
files, and bytes of its own. It stays in the target from its first use to the end of the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial

from iobench.bench.plan import Plan
from iobench.bench.processes.group import Failed, ProcessGroup
from iobench.bench.processes.job import CheckpointRef, Job
from iobench.bench.processes.loop import Loop, Looped
from iobench.bench.stored_files import manifest, stored_files
from iobench.bench.targets.base import OpenTarget
from iobench.results.records import BackgroundRestores

__all__ = ["Background", "Restores"]

_WARM_UP = "warm-up-background"


@dataclass(frozen=True, kw_only=True)
class Restores:
    """The restores beside one operation, known after its end."""

    writer: str
    ended: list[Looped | Failed] = field(default_factory=list)

    def during(self, began_s: float, elapsed_s: float) -> BackgroundRestores:
        """Return what was restored from `began_s` of time.perf_counter on, for `elapsed_s`."""
        (one,) = self.ended
        if isinstance(one, Failed):
            return BackgroundRestores(
                writer=self.writer,
                restores=0,
                bytes=0,
                lead_s=0.0,
                lag_s=0.0,
                reading_s=0.0,
                resident_fraction=0.0,
                from_storage=None,
                mismatches=0,
                error=one.error,
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
            writer=self.writer,
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
        self._scratch = target.scratch
        self._setup = plan.reader_setup()
        self._maker = next(
            plan.contenders.index(one.contender)
            for one in plan.variants
            if one.background and one.target == location
        )
        first = partial(Job.warm_up, directories=[self._scratch.locate(_WARM_UP)])
        self._group = ProcessGroup([self._setup], first, temporary=self._scratch.directory)
        self._made = False

    def __exit__(self, *error: object) -> None:
        self._group.__exit__(*error)

    @contextmanager
    def restoring(self, contender: int, shape: int) -> Iterator[Restores]:
        """Restore the earlier checkpoint, from before the block until after it.

        `contender` and `shape` are indices of the plan's. A peer has a format of its own, so
        `buffered` restores next to it, in a bucket `s3`. Raises JobError if no restore can begin.
        If one fails later, the result says so.
        """
        if not (self._made and self._group.started):  # only that process knows the right bytes
            self._make()
        ref = self._ref(contender, shape)
        restores = Restores(writer=self._setup.contenders[contender].label)
        with self._group.looping(Loop(ref=ref)) as ended:
            yield restores
        restores.ended.extend(ended)

    def _make(self) -> None:
        """Save one checkpoint of each shape. All of them are there, or none is used."""
        self._made = False
        for shape, files in enumerate(self._setup.files):
            self._scratch.remove(_name(shape))
            self._group.ask(1, partial(Job.prepare, shape=shape, checkpoint=()))
            with self._scratch.staged(_name(shape)) as staged:
                ref = CheckpointRef(
                    contender=self._maker, shape=shape, directory=str(staged.directory)
                )
                done = self._group.ask(1, partial(Job.save, ref=ref))
                text = manifest(
                    0,
                    self._setup.contenders[self._maker],
                    stored_files([files], done, apart=False),
                )
                staged.publish(map(str.encode, text))
        self._scratch.remove(_WARM_UP)
        self._made = True

    def _ref(self, contender: int, shape: int) -> CheckpointRef:
        directory = self._scratch.locate(_name(shape))
        return CheckpointRef(contender=contender, shape=shape, directory=directory)


def _name(shape: int) -> str:
    return f"earlier-{shape}"
