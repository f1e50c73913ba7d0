"""Files of a pinned generation in a remote tier: made of the slots, and read back into a state.

`optimizer-state` has the fp32 tensors of all chunks in order, without the headers of the slots; the
checksums of its pieces are those in the generation's record. `optimizer.json` describes them. Of
several ranks each has files of its own: `optimizer-state-0`, `optimizer-0.json`.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from iobench import linux
from iobench.checkpoint.manifest import FileRecord, Manifest, Piece, PinnedGeneration
from iobench.errors import DataMismatchError, TransferError
from iobench.offload.clones import PinClones
from iobench.offload.files import StateFile, file_sizes
from iobench.offload.layout import BLOCK, ParameterSpec, StateLayout
from iobench.offload.ranges import whole_name
from iobench.offload.record import GenerationRecord
from iobench.tiers.source_file import LocalDamageError, SourceFile
from iobench.writers.base import Writer
from iobench.writers.blocks.pages import fresh_pages
from iobench.writers.image import Bytes, FileImage

__all__ = ["ExportedFiles", "ExportedState", "SlotsFile"]

_SCHEMA = "iobench.offload.export/1"


@dataclass(frozen=True)
class ExportedFiles:
    """The files of one rank; of None if there is only one."""

    rank: int | None = None

    @property
    def state(self) -> str:
        """The name of the file with the tensors."""
        return "optimizer-state" if self.rank is None else f"optimizer-state-{self.rank}"

    @property
    def description(self) -> str:
        """The name of the file that describes them."""
        return "optimizer.json" if self.rank is None else f"optimizer-{self.rank}.json"

    def record(self, layout: StateLayout, record: GenerationRecord) -> FileRecord:
        """Return the record of the file `state` of a generation; reads nothing."""
        pieces = tuple(
            Piece(f"chunk {chunk}", layout.state_bytes(chunk) - BLOCK, f"{int(row['state']):016x}")
            for chunk, row in enumerate(record.rows)
        )
        size_bytes = sum(one.size_bytes for one in pieces)
        return FileRecord(path=self.state, size_bytes=size_bytes, pieces=pieces)

    def described(self, layout: StateLayout, record: GenerationRecord) -> FileImage:
        """Return the file `description` of a generation."""
        text = json.dumps(
            {
                "schema": _SCHEMA,
                "layout": json.loads(layout.to_json()),
                "updates": record.updates,
                "counts": [int(count) for count in record.counts],
                "groups": [dict(group) for group in record.groups],
            }
        )
        return FileImage.of(self.description, [np.frombuffer(text.encode(), dtype=np.uint8)])


class SlotsFile(SourceFile):
    """A file `name` with the tensors, read from the slots of a pinned generation past the page
    cache.

    Its pin must stay held. Any thread may read.
    """

    def __init__(
        self, directory: Path, layout: StateLayout, record: GenerationRecord, name: str
    ) -> None:
        """Open the file of the slots. Raises LocalDamageError."""
        self.name, self._layout, self._rows = name, layout, record.rows
        self._clones = PinClones(directory, layout)
        sizes = [layout.state_bytes(chunk) - BLOCK for chunk in range(layout.chunks)]
        self._starts = [0, *itertools.accumulate(sizes)]
        self.size_bytes = self._starts[-1]
        try:
            self._file = StateFile(directory / "state", file_sizes(layout)["state"])
        except (DataMismatchError, TransferError) as error:
            raise LocalDamageError(str(error)) from error

    def read(self, start: int, stop: int) -> Bytes:
        """Return the bytes [start, stop). Raises LocalDamageError."""
        parts: list[Bytes] = []
        chunk = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            first, end = self._starts[chunk], min(stop, self._starts[chunk + 1])
            parts.append(self._read(chunk, start - first, end - first))
            start, chunk = end, chunk + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _read(self, chunk: int, start: int, stop: int) -> Bytes:
        """Return a part of a chunk; direct reads are of whole blocks."""
        begin, end = start // BLOCK * BLOCK, -(-stop // BLOCK) * BLOCK
        slot = int(self._rows[chunk]["slot"])
        offset = self._layout.offset("state", chunk, slot) + BLOCK
        try:
            with self._clones.file_of("state", slot, self._file) as file:
                data = file.read(end - begin, offset + begin)
        except (DataMismatchError, TransferError) as error:
            raise LocalDamageError(str(error)) from error
        return data[start - begin : stop - begin]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(frozen=True, kw_only=True)
class ExportedState:
    """The part of one rank in the files of a checkpoint. An OldPart."""

    layout: StateLayout
    updates: int
    counts: Sequence[int]
    groups: Sequence[Mapping[str, Any]]
    file: FileRecord
    location: str | Path
    writer: Writer

    @classmethod
    def parts(cls, manifest: Manifest, location: str | Path, writer: Writer) -> list[ExportedState]:
        """Read the descriptions of all ranks. Raises DataMismatchError, TransferError."""
        pinned = manifest.pinned
        several = len(pinned) > 1
        return [
            cls._part(manifest, ExportedFiles(rank if several else None), one, location, writer)
            for rank, one in enumerate(pinned)
        ]

    @classmethod
    def _part(
        cls,
        manifest: Manifest,
        names: ExportedFiles,
        pinned: PinnedGeneration,
        location: str | Path,
        writer: Writer,
    ) -> ExportedState:
        record = manifest.file(names.description)
        memory = np.empty(record.size_bytes, dtype=np.uint8)
        writer.read(FileImage.of(record.path, [memory]), location)
        where = f"{location}/{record.path}"
        if xxhash.xxh3_64_hexdigest(memory.data) != record.pieces[0].xxh3_64:
            raise DataMismatchError(f"{where}: damaged, its checksum differs")
        found = json.loads(memory.tobytes())
        if found.get("schema") != _SCHEMA:
            raise DataMismatchError(f"{where}: schema {found.get('schema')!r} is not {_SCHEMA!r}")
        (file,) = (one for one in pinned.files if one.path == names.state)
        return cls(
            layout=StateLayout.from_json(json.dumps(found["layout"]), where),
            updates=found["updates"],
            counts=found["counts"],
            groups=found["groups"],
            file=file,
            location=location,
            writer=writer,
        )

    @property
    def where(self) -> str:
        """The place, for messages."""
        return f"{self.location}/{self.file.path}"

    def check_same(self, specs: Sequence[ParameterSpec]) -> None:
        """Raise StateMismatchError unless `specs` are the parameters, and this is all of them.

        Its whole shapes are compared, if it is not the part of a rank.
        """
        if all(whole_name(one.name) == one.name for one in self.layout.parameters):
            self.layout.check_same(specs, self.where)

    @contextmanager
    def chunks(self) -> Iterator[Callable[[int], Bytes]]:
        """Yield a function that returns the fp32 tensors of a chunk, compared with its checksum."""
        # Address space for the whole file; only one chunk takes memory.
        memory = fresh_pages(self.file.size_bytes, huge=False)
        image = FileImage.of(self.file.path, [memory])
        starts = [0, *itertools.accumulate(piece.size_bytes for piece in self.file.pieces)]

        def read(chunk: int) -> Bytes:
            start, stop = starts[chunk], starts[chunk + 1]
            if chunk:  # the one before is used
                linux.give_up_pages(memory.ctypes.data, start)
            self.writer.read(image, self.location, start=start, stop=stop)
            if xxhash.xxh3_64_hexdigest(memory[start:stop].data) != self.file.pieces[chunk].xxh3_64:
                raise DataMismatchError(f"{self.where}: chunk {chunk} differs from its checksum")
            return memory[start:stop]

        yield read
