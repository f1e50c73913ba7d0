"""export: writes a stored checkpoint in another format, in bounded memory, whole or not at all."""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import xxhash
from isal import isal_zlib

from iobench import linux
from iobench.checkpoint.manifest import MANIFEST
from iobench.errors import DataMismatchError, OptionError, TargetError, UsageError
from iobench.exports.layouts import (
    ExportFile,
    ExportFormat,
    ExportTensor,
    bytes_of,
    files_of,
    index_of,
    readable_values,
    tensors_of,
)
from iobench.exports.source import ExportSource, check_fits, checksums_of, read_tensors
from iobench.exports.staged_directory import StagedDirectory
from iobench.ranks.control import Control, shared_control
from iobench.ranks.world import AnyWorld, World
from iobench.units import MIB, parse_size
from iobench.verification.dcp import DATA, METADATA
from iobench.verification.directories import SIDECAR
from iobench.verification.inventory import CheckedRange, FileTree, ListedFile, VerifyInventory
from iobench.verification.reading import OnRead, read_all
from iobench.verification.tensor_files import has_tensors
from iobench.verification.verify import writer_for
from iobench.writers.base import Writer
from iobench.writers.image import Bytes
from iobench.writers.s3_store.target import is_s3

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_LEAST_MEMORY, _PARTS, _LARGEST_PIECE = 128 * MIB, 16, 32 * MIB
_DEADLINE_S = 24 * 3600.0
"""How long ranks wait for one another's files; a rank that ends is known at once."""


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """Result of `export`, of all ranks together.

    `proved_bytes` of the `source_bytes` had a checksum, which was compared while they were read.
    `verified_bytes` were read back and compared. `ties` maps each name that is not stored to the
    one that is; `left_out` are plain values that the format cannot hold.
    """

    source: str
    out: str
    format: ExportFormat
    files: tuple[str, ...]
    tensors: int
    size_bytes: int
    source_bytes: int
    proved_bytes: int
    verified_bytes: int
    write_s: float
    verify_s: float
    elapsed_s: float
    ties: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def export(
    path: str | Path,
    out: str | Path,
    *,
    format: ExportFormat = "safetensors",  # noqa: A002 -- as the command names it
    key: str = "",
    strip_prefix: str = "",
    dtype: str | None = None,
    max_shard_size: int | str = "5GB",
    memory: int | str = "1GiB",
    writer: Writer | str | None = None,
    replace: bool = False,
    verify: bool = True,
    world: AnyWorld = "job",
    progress: OnRead | None = None,
) -> ExportReport:
    """Write the tensors of the checkpoint at `path` to `out`, in the `format` of other programs.

    `path` is one that `verify` reads: a checkpoint of iobench, or a run, of which the newest step
    is taken; a DCP directory; a Hugging Face directory; a file of safetensors or torch.save. `out`
    is a directory of safetensors with their index, as transformers saves them ("safetensors"), a
    DCP directory ("dcp"), or one file of torch.save ("torch").

    - `key`: only what is below this entry of the state ("model"); `strip_prefix` is removed from
      the names that begin with it
    - `dtype`: "bf16", "fp16" or "fp32" for tensors of floats of 2 to 8 bytes; others stay
    - `max_shard_size`: bytes of tensors in a file, except one larger tensor
    - `memory`: host memory for tensors on their way, however large they are; 128 MiB or more
    - `writer` reads and writes: a Writer, its name or a config; by default `hybrid`, and `s3` to
      read a bucket, with `hybrid` to write
    - `replace`: replace an older export; files without tensors are kept, such as config.json
    - `verify`: read all files again and compare them with what was written
    - `world`: in a job, all ranks call this, and each writes some of the files; "alone": one does

    On return `out` is durable under its name; after a failure there is nothing. Checksums of the
    source are compared. `progress` gets the bytes that this rank has written and read again, and
    how many there are. Raises UsageError, DataMismatchError for damage, TransferError, RankError.
    """
    given = {**locals(), "out": Path(out)}
    del given["world"]
    if is_s3(out):
        raise UsageError(f"{out}: an export is a directory or a file; copy it to the bucket")
    made, found = Export(**given), World.of(world)
    control = shared_control(found, Path(os.path.abspath(out)).parent).sub(
        "export", deadline_s=_DEADLINE_S
    )
    try:
        return made.run(control)
    except BaseException as error:
        if not isinstance(error, Exception):  # the others wait for an interrupted rank
            control.fail(error)
        raise


class _Written(NamedTuple):
    """What a rank has written, as JSON."""

    sizes: dict[str, int]
    source_bytes: int
    proved_bytes: int
    write_s: float
    verify_s: float


@dataclass(kw_only=True)
class Export:
    """One export; see `export`."""

    path: str | Path
    out: Path
    format: ExportFormat
    key: str
    strip_prefix: str
    dtype: str | None
    max_shard_size: int | str
    memory: int | str
    writer: Writer | str | None
    replace: bool
    verify: bool
    progress: OnRead | None
    _source: ExportSource | None = None
    _done: int = 0
    _total: int = 0

    def __post_init__(self) -> None:
        if self.format not in get_args(ExportFormat):
            raise OptionError(f"format {self.format!r}: choose {', '.join(get_args(ExportFormat))}")
        self.dtype = _SHORT.get(self.dtype or "", self.dtype)
        if self.dtype is not None and self.dtype not in _SHORT.values():
            raise OptionError(f"dtype {self.dtype!r}: choose bf16, fp16 or fp32")
        self.memory_bytes = parse_size(self.memory)
        self.max_shard_bytes = parse_size(self.max_shard_size)
        if self.memory_bytes < _LEAST_MEMORY:
            raise OptionError(f"memory {self.memory_bytes} bytes: 128MiB or more")
        if self.max_shard_bytes < 1:
            raise OptionError(f"max_shard_size {self.max_shard_bytes}: 1 byte or more")
        piece_bytes = min(self.memory_bytes // _PARTS, _LARGEST_PIECE)
        self._piece_bytes = piece_bytes - piece_bytes % linux.PAGE
        self._reader, self._writer = _writers(self.path, self.out, self.writer)

    def run(self, control: Control) -> ExportReport:
        """Write all files in all ranks. Returns the same report in each."""
        began_s = time.perf_counter()
        rank, step = control.world.rank, control.together

        def first(work: Callable[[], Any]) -> Callable[[], Any]:
            return work if rank == 0 else lambda: None

        _, ((where, token), *_) = step("reading the index", first(self._begin))
        source, plans = step("planning", lambda: self._plan(where), lambda _: self._names())
        if any(one != plans[0] for one in plans):
            raise UsageError(f"{where}: changed while the ranks read its index; export it again")
        staged = StagedDirectory(self.out, token=token)
        try:
            step("staging", first(lambda: self._stage(staged)))
            own = self._files[rank :: control.world.size]
            every = step("writing", lambda: self._write(staged, source, own))[1]
            written = [_Written(*one) for one in every]
            step("publishing", first(lambda: self._publish(staged, written)))
        finally:
            if rank == 0:
                staged.discard()
        return self._report(source, written, time.perf_counter() - began_s)

    def _begin(self) -> tuple[str, str]:
        """Return the checkpoint that all ranks read, and the token of what they write."""
        self._check_out()
        self._source = ExportSource.open(self.path, self._reader)
        return self._source.where, secrets.token_hex(4)

    def _check_out(self) -> None:
        """Raise TargetError if `out` exists and may not be replaced."""
        out, is_file = self.out, self.format == "torch"
        inside = list(out.iterdir()) if out.is_dir() and not is_file else []
        if not os.path.lexists(out) or (out.is_dir() and not is_file and not inside):
            return
        if not self.replace:
            raise TargetError(f"{out}: exists; choose another name, or replace it (--replace)")
        names = {one.name for one in inside}
        if is_file and not out.is_file():
            raise TargetError(f"{out}: is not a file, so a torch file does not replace it")
        if not is_file and (
            MANIFEST in names
            or any(one.is_dir() for one in inside)
            or not any(map(_of_tensors, names))
        ):
            raise TargetError(f"{out}: is not a directory of an export alone; remove it yourself")

    def _plan(self, where: str) -> ExportSource:
        """Find the files; the same ones in every rank."""
        source = self._source or ExportSource.open(where, self._reader)
        chosen = source.selected(self.key, self.strip_prefix)
        tensors = tensors_of(chosen, self.dtype)
        for tensor in tensors:
            check_fits(tensor.source, tensor.names[0], self.memory_bytes // 2)
        values = chosen.values
        if self.format != "dcp":
            values = readable_values(values) if self.format == "torch" else {}
        self._left_out = tuple(sorted(chosen.values.keys() - values.keys()))
        self._ties = {tied: one.names[0] for one in tensors for tied in one.names[1:]}
        name = self.out.name
        self._files = files_of(self.format, name, tensors, values, self.max_shard_bytes)
        return source

    def _names(self) -> list[list[Any]]:
        return [[file.path, file.size_bytes] for file in self._files]

    def _stage(self, staged: StagedDirectory) -> None:
        staged.begin()
        if self.format != "torch":
            staged.path.mkdir(exist_ok=True)

    def _write(
        self, staged: StagedDirectory, source: ExportSource, files: Sequence[ExportFile]
    ) -> _Written:
        """Write these files, and read them again."""
        began_s = time.perf_counter()
        tensors = [tensor.source for file in files for tensor in file.tensors]
        expected, location = checksums_of(source.inventory), source.inventory.location
        self._total = sum(file.size_bytes for file in files) * (2 if self.verify else 1)
        written: list[tuple[str, list[CheckedRange]]] = []
        reading = read_tensors(location, tensors, expected, piece_bytes=self._piece_bytes)
        with closing(reading):
            pieces = itertools.groupby(reading, key=itemgetter(0))
            for file in files:
                path = str(staged.path if self.format == "torch" else staged.path / file.path)
                written.append((path, self._write_file(path, file, pieces)))
        write_s = time.perf_counter() - began_s
        for path, ranges in written if self.verify else ():
            self._read_again(path, ranges)
        parts = [part for tensor in tensors for part in tensor.parts]
        return _Written(
            {file.path: file.size_bytes for file in files},
            sum(part.stop - part.start for part in parts),
            sum(part.stop - part.start for part in parts if part[:3] in expected),
            write_s,
            time.perf_counter() - began_s - write_s,
        )

    def _write_file(
        self, path: str, file: ExportFile, pieces: Iterator[tuple[int, Iterator[Any]]]
    ) -> list[CheckedRange]:
        """Write a file; return the checksum of each part."""
        ranges: list[CheckedRange] = []
        at, last_crc = 0, [0]
        crc = self.format != "safetensors"  # the other formats have a CRC32 of each tensor
        with self._writer.open(path, file.size_bytes) as stream:
            for part in file.streamed(lambda: last_crc[0]):
                digest, begin, name = xxhash.xxh3_64(), at, ""
                chunks: Iterable[Bytes] = [part] if isinstance(part, np.ndarray) else []
                if isinstance(part, ExportTensor):
                    name, chunks = part.names[0], bytes_of(part, pieces)
                    last_crc[0] = 0
                for data in chunks:
                    stream.write(data)
                    digest.update(data.data)
                    if crc and name:
                        last_crc[0] = isal_zlib.crc32(data, last_crc[0])
                    at += len(data)
                    self._moved(len(data))
                ranges.append(CheckedRange(begin, at, name, xxh3_64=digest.hexdigest()))
        assert at == file.size_bytes
        return ranges

    def _read_again(self, path: str, ranges: list[CheckedRange]) -> None:
        """Compare a file with what was written. Raises DataMismatchError."""
        location = FileTree(path, self._writer)
        (name, size), before = *location.sizes.items(), self._done
        inventory = VerifyInventory(location=location)
        inventory.files[name] = ListedFile(size_bytes=size, layers=[ranges])

        def moved(done: int, _total: int) -> None:
            self._moved(before + done - self._done)

        read_all(inventory, lambda *_: [], moved, window_bytes=self._piece_bytes)
        if inventory.findings:
            raise DataMismatchError(f"{path}: was not stored as written: {inventory.findings[0]}")

    def _moved(self, size_bytes: int) -> None:
        self._done += size_bytes
        if self.progress is not None:
            self.progress(self._done, self._total)

    def _publish(self, staged: StagedDirectory, written: Sequence[_Written]) -> None:
        """Add the index, and give the files their name."""
        for rank, one in enumerate(written):
            for name, size in one.sizes.items():
                path = staged.path if self.format == "torch" else staged.path / name
                if not path.is_file() or path.stat().st_size != size:
                    raise TargetError(
                        f"{path}: rank {rank} wrote {size} bytes, but rank 0 does not see them; "
                        "all ranks need the same directory"
                    )
        index = index_of(self.format, self._files)
        if index:
            self._writer.write_many(index, staged.path)
        self._check_out()  # again: someone may have made it meanwhile
        if self.replace and self.out.is_dir():
            for entry in self.out.iterdir():
                if not _of_tensors(entry.name):
                    shutil.copy2(entry, staged.path / entry.name)
        staged.publish()

    def _report(
        self, source: ExportSource, written: Sequence[_Written], elapsed_s: float
    ) -> ExportReport:
        size = sum(file.size_bytes for file in self._files)
        return ExportReport(
            source=source.where,
            out=str(self.out),
            format=self.format,
            files=tuple(file.path for file in self._files),
            tensors=sum(len(file.tensors) for file in self._files),
            size_bytes=size,
            source_bytes=sum(one.source_bytes for one in written),
            proved_bytes=sum(one.proved_bytes for one in written),
            verified_bytes=size if self.verify else 0,
            write_s=max(one.write_s for one in written),
            verify_s=max(one.verify_s for one in written),
            elapsed_s=elapsed_s,
            ties=self._ties,
            left_out=self._left_out,
        )


def _writers(
    path: str | Path, out: str | Path, writer: Writer | str | None
) -> tuple[Writer, Writer]:
    """Return what reads and what writes: a bucket has a writer of its own."""
    given = None if writer is None else writer_for(out, writer)
    if given is not None and not given.stores:
        raise UsageError(f"writer {given.name!r} stores nothing; choose another writer")
    bucket = given is not None and "file" not in given.schemes
    reader = given if bucket == is_s3(path) else None
    return writer_for(path, reader), writer_for(out, None if bucket else given)


def _of_tensors(name: str) -> bool:
    """Whether a file of an export has this name, unlike config.json or a tokenizer."""
    return has_tensors(name) or name.endswith((DATA, METADATA, ".index.json", SIDECAR))
