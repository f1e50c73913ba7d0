"""ObjectStore: checkpoints under a prefix of a bucket. A manifest object makes one complete."""

from __future__ import annotations

import os
from contextlib import closing

from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.staged import MANIFEST
from iobench.checkpoint.staged_objects import StagedObjects
from iobench.checkpoint.store import name_of, step_of
from iobench.errors import UsageError
from iobench.writers.base import Writer
from iobench.writers.s3 import S3Writer
from iobench.writers.s3_objects import S3Objects
from iobench.writers.s3_target import S3Target

__all__ = ["ObjectStore"]


class ObjectStore:
    """A store has neither renames nor locks: one process at a time may write to a prefix."""

    def __init__(self, location: str, writer: Writer) -> None:
        if not isinstance(writer, S3Writer):
            raise UsageError(f"{location}: needs the writer s3")
        self._place, self._writer = S3Target.parse(location), writer

    def __str__(self) -> str:
        return str(self._place)

    def steps(self) -> list[int]:
        return sorted(step for step, complete in self._found().items() if complete)

    def manifest(self, step: int) -> Manifest:
        where = f"{self.locate(step)}/{MANIFEST}"
        with closing(self._writer.open_source(where)) as source:
            size = source.seek(0, os.SEEK_END)
            source.seek(0)
            return Manifest.parse(source.read(size), where)

    def locate(self, step: int) -> str:
        return str(self._place.below(name_of(step)))

    def staged(self, step: int) -> StagedObjects:
        return StagedObjects(self.locate(step), self._writer)

    def remove(self, step: int) -> None:
        place = self._place.below(name_of(step))
        objects = S3Objects(self._writer.client, place)
        objects.delete([place.below(MANIFEST).key])  # first: without it, it is none any more
        objects.remove()

    def clean(self) -> None:
        for step, complete in self._found().items():
            if not complete:
                S3Objects(self._writer.client, self._place.below(name_of(step))).remove()

    def _found(self) -> dict[int, bool]:
        """The steps of which there is anything, and whether they are complete."""
        objects = S3Objects(self._writer.client, self._place)
        keys = [*objects.keys(), *(upload.target.key for upload in objects.uploads())]
        found: dict[int, bool] = {}
        for key in keys:
            name, _, file = key.removeprefix(self._place.key).strip("/").partition("/")
            step = step_of(name)
            if step is not None:
                found[step] = found.get(step, False) or file == MANIFEST
        return found
