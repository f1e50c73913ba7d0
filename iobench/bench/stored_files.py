"""The files of a checkpoint of the benchmark, and the manifest that lists them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as _quoted

from iobench.bench.contenders.base import Contender
from iobench.bench.processes.job import Done, own_name
from iobench.workloads.specs import FileFormat, FileSpec


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file in the checkpoint; a slice has the bytes of a file of the workload from `start` on."""

    path: str
    format: FileFormat
    size_bytes: int
    start: int | None = None
    """None without slices."""


def stored_files(
    files: Sequence[Sequence[FileSpec]], done: Sequence[Done], *, apart: bool
) -> Iterator[StoredFile]:
    """Yield what each job has saved. `files` are those of each job, which is `apart` or alone."""
    for number, (specs, one) in enumerate(zip(files, done, strict=True)):
        below = f"{own_name(number)}/" if apart else ""
        for item, start, stop in one.slices:
            spec = specs[item]
            yield StoredFile(
                path=f"{below}{spec.path}",
                format=spec.format,
                size_bytes=stop - start,
                start=start,
            )
        for spec, size in zip(specs if one.file_bytes else (), one.file_bytes, strict=True):
            yield StoredFile(path=f"{below}{spec.path}", format=spec.format, size_bytes=size)


def manifest(step: int, contender: Contender, files: Iterable[StoredFile]) -> Iterator[str]:
    """Yield the manifest as JSON, file by file: there may be 100,000."""
    head = {
        "schema": "iobench.manifest/1",
        "step": step,
        "writer": {"name": contender.name, "options": dict(contender.options)},
    }
    yield f'{json.dumps(head)[:-1]}, "files": ['
    between = "\n"
    for one in files:
        entry = f'"path": {_quoted(one.path)}, "format": "{one.format}", "bytes": {one.size_bytes}'
        start = "" if one.start is None else f', "start": {one.start}'
        yield f"{between}{{{entry}{start}}}"
        between = ",\n"
    yield "\n]}"
