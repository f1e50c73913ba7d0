"""Nearest: a checkpoint whose bytes are read from memory, and from storage where memory lacks them.

A load sees a store and a writer as usual. `NearestStore` has the checkpoint also if it was never
committed; `NearestWriter` fills its files from the nearest valid copy.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from iobench.checkpoint.checksums import record_of
from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.ranked.index import INDEX
from iobench.checkpoint.ranked.merge import merged
from iobench.checkpoint.store import CheckpointStore
from iobench.checkpoint.tree_spec import json_text
from iobench.errors import DataMismatchError, ReplicaError
from iobench.replicas.fetch import Fetched, Fetcher
from iobench.replicas.header import SaveHeader
from iobench.replicas.recovery import RecoveryPlan
from iobench.units import MIB
from iobench.writers.base import Writer
from iobench.writers.image import FileImage
from iobench.writers.transfer import Meter, Transfer

__all__ = ["NearestStore", "NearestWriter", "headers_of", "manifest_of"]


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


class NearestStore:
    """`store`, in which the step of `manifest` exists. For loads only."""

    def __init__(self, store: CheckpointStore, manifest: Manifest) -> None:
        self._store, self._manifest = store, manifest

    def __str__(self) -> str:
        return str(self._store)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def steps(self) -> list[int]:
        """Return the steps of `store`, and the one in memory."""
        return sorted({*self._store.steps(), self._manifest.step})

    def manifest(self, step: int, *, files: bool = True) -> Manifest:
        """Return the manifest of a step."""
        if step == self._manifest.step:
            return self._manifest
        return self._store.manifest(step, files=files)


class NearestWriter:
    """`writer`, whose reads in `location` come from memory as far as it has valid bytes.

    `names` maps the files in memory to the ranks that saved them, `texts` has whole files. `notes`
    lists the sources that were replaced, and `read_bytes` counts by source.
    """

    def __init__(
        self,
        writer: Writer,
        location: str | Path,
        fetcher: Fetcher,
        names: dict[str, int],
        texts: dict[str, bytes],
        *,
        stored: bool,
    ) -> None:
        self._writer, self._location, self._fetcher = writer, str(location), fetcher
        self._names, self._texts, self._stored = names, texts, stored
        self._lock = threading.Lock()
        self.notes: list[str] = []
        self.read_bytes: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def read(
        self, image: FileImage, target: str | Path, *, start: int = 0, stop: int | None = None
    ) -> Transfer:
        """Fill bytes [start, stop) of the image; see Writer.read."""
        stop = image.size_bytes if stop is None else stop
        known = str(target) == self._location
        if known and image.path in self._texts:
            return self._text(image, start, stop)
        if not known or image.path not in self._names:
            return self._writer.read(image, target, start=start, stop=stop)
        meter, rank = Meter(), self._names[image.path]
        missing: list[tuple[int, int]] = []
        with self._lock, meter.phase("memory"):
            for at in range(start, stop, _AT_ONCE):
                missing += self._fetch(rank, image, at, min(at + _AT_ONCE, stop), meter)
        if missing and not self._stored:
            raise DataMismatchError(
                f"step at {target}: no copy of rank {rank} has valid bytes {missing[:3]}: "
                f"{'; '.join(self.notes[-3:])}"
            )
        for begin, end in missing:
            meter.fell_back("memory", "storage", f"bytes of rank {rank}")
            done = self._writer.read(image, target, start=begin, stop=end)
            meter.add(done, done.phases_s)
            self._count("storage", end - begin)
        return meter.transfer(self._writer.name, "read", stop - start, durable=True)

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
                self.notes.append(str(error))
                found = Fetched(missing=[(at, end)])
            for kind, count in found.read_bytes.items():
                meter.count(f"memory ({kind})", count)
                self._count(kind, count)
            self.notes += found.notes
            for begin, after in [*found.missing, (end, end)]:
                if begin > at:
                    image.filled(at, begin)
                at = after
            missing += found.missing
            at = end
        return missing

    def _count(self, kind: str, size_bytes: int) -> None:
        self.read_bytes[kind] = self.read_bytes.get(kind, 0) + size_bytes

    def _text(self, image: FileImage, start: int, stop: int) -> Transfer:
        meter, at = Meter(), start
        for view in image.views(start, stop):
            view[:] = memoryview(self._texts[image.path])[at : at + len(view)]
            at += len(view)
        image.filled(start, stop)
        meter.count("memory (own)", stop - start)
        return meter.transfer(self._writer.name, "read", stop - start, durable=True)
