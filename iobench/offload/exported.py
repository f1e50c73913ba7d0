"""Files of a pinned generation in a remote tier: made of the slots, and read back into a state.

`optimizer-state` has the fp32 tensors of all chunks in order, without the headers of the slots; the
checksums of its pieces are those in the generation's record. `optimizer.json` describes them.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from iobench.checkpoint.checksums import read_file
from iobench.checkpoint.manifest import FileRecord, Manifest, Piece
from iobench.checkpoint.piece_reader import PieceReader, StoredPiece, pieces_of
from iobench.errors import DataMismatchError, TransferError
from iobench.offload.files import StateFile, file_sizes
from iobench.offload.layout import BLOCK, ParameterPiece, StateLayout
from iobench.offload.record import GenerationRecord
from iobench.offload.update import place
from iobench.remote.source_file import LocalDamageError, SourceFile
from iobench.writers.base import StoredReader, Writer
from iobench.writers.image import Bytes, FileImage

if TYPE_CHECKING:
    import numpy.typing as npt

_STATE, _DESCRIPTION = "optimizer-state", "optimizer.json"
_SCHEMA = "iobench.offload.export/1"


def file_of(layout: StateLayout, record: GenerationRecord) -> FileRecord:
    """Return the record of the file `optimizer-state` of a generation; reads nothing."""
    pieces = tuple(
        Piece(
            f"chunk {chunk}", layout.slot_bytes("state", chunk) - BLOCK, f"{int(row['state']):016x}"
        )
        for chunk, row in enumerate(record.rows)
    )
    return FileRecord(path=_STATE, size_bytes=sum(one.size_bytes for one in pieces), pieces=pieces)


def description_of(layout: StateLayout, record: GenerationRecord) -> FileImage:
    """Return the file `optimizer.json` of a generation."""
    text = json.dumps(
        {
            "schema": _SCHEMA,
            "layout": json.loads(layout.to_json()),
            "updates": record.updates,
            "counts": [int(count) for count in record.counts],
            "groups": [dict(group) for group in record.groups],
        }
    )
    return FileImage.of(_DESCRIPTION, [np.frombuffer(text.encode(), dtype=np.uint8)])


class SlotsFile(SourceFile):
    """The file `optimizer-state`, read from the slots of a pinned generation past the page cache.

    Its pin must stay held. Any thread may read.
    """

    def __init__(self, directory: Path, layout: StateLayout, record: GenerationRecord) -> None:
        """Open the file of the slots. Raises LocalDamageError."""
        self.name, self._layout, self._rows = _STATE, layout, record.rows
        sizes = [layout.slot_bytes("state", chunk) - BLOCK for chunk in range(layout.chunks)]
        self._starts = [0, *itertools.accumulate(sizes)]
        self.size_bytes = self._starts[-1]
        try:
            self._file = StateFile(directory / "state", file_sizes(layout)["state"])
        except (DataMismatchError, TransferError) as error:
            raise LocalDamageError(str(error)) from error

    def fill(self, start: int, block: Bytes) -> None:
        """Fill `block` with the bytes from `start` on. Raises LocalDamageError."""
        at, stop = start, start + len(block)
        chunk = bisect.bisect_right(self._starts, at) - 1
        while at < stop:
            first, end = self._starts[chunk], min(stop, self._starts[chunk + 1])
            block[at - start : end - start] = self._read(chunk, at - first, end - first)
            at, chunk = end, chunk + 1

    def _read(self, chunk: int, start: int, stop: int) -> Bytes:
        """Return a part of a chunk; direct reads are of whole blocks."""
        begin, end = start // BLOCK * BLOCK, -(-stop // BLOCK) * BLOCK
        offset = self._layout.offset("state", chunk, int(self._rows[chunk]["slot"])) + BLOCK
        try:
            data = self._file.read(end - begin, offset + begin)
        except (DataMismatchError, TransferError) as error:
            raise LocalDamageError(str(error)) from error
        return data[start - begin : stop - begin]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class ExportedState:
    """The optimizer's state in the files of a checkpoint at `location`. A StateSource.

    It takes memory for one chunk, however large the file is.
    """

    def __init__(self, manifest: Manifest, location: str | Path, writer: Writer) -> None:
        """Read the description. Raises DataMismatchError, TransferError."""
        self._copy = StoredReader(writer, location)
        where = f"{location}/{_DESCRIPTION}"
        found = json.loads(read_file(self._copy, manifest.file(_DESCRIPTION)))
        if found.get("schema") != _SCHEMA:
            raise DataMismatchError(f"{where}: schema {found.get('schema')!r} is not {_SCHEMA!r}")
        (pinned,) = manifest.pinned
        (self._file,) = (one for one in pinned.files if one.path == _STATE)
        self.layout = StateLayout.from_json(json.dumps(found["layout"]), where)
        self.updates: int = found["updates"]
        self.groups: Sequence[Mapping[str, Any]] = found["groups"]
        self.counts: npt.NDArray[np.uint64] = np.array(found["counts"], dtype=np.uint64)
        self._pieces = self._read_pieces()
        self._piece: tuple[ParameterPiece, list[torch.Tensor]] | None = None

    @property
    def where(self) -> str:
        """The file, for messages."""
        return f"{self._copy.location}/{self._file.path}"

    def read(self, parameter: int, begin: int, into: Sequence[torch.Tensor]) -> None:
        """See StateSource. Its chunks may have another size than ours."""
        at, end = begin, begin + len(into[0])
        while at < end:
            if self._piece is None or (self._piece[0].parameter, self._piece[0].end) <= (
                parameter,
                at,
            ):
                self._piece = next(self._pieces)
                continue
            piece, tensors = self._piece
            stop = min(piece.end, end)
            for own, tensor in zip(into, tensors, strict=True):
                own[at - begin : stop - begin].copy_(tensor[at - piece.begin : stop - piece.begin])
            at = stop

    def _read_pieces(self) -> Iterator[tuple[ParameterPiece, list[torch.Tensor]]]:
        """Yield each piece with its tensors, compared with their checksum."""
        files = {self._file.path: self._file}
        read: list[Bytes] = []

        def deliver(_: StoredPiece, data: Bytes) -> bool:
            read.append(data)
            return True

        for chunk, stored in enumerate(pieces_of(self._file)):
            PieceReader().read(self._copy, files, [stored], deliver)
            data = torch.from_numpy(read.pop()).view(torch.float32)
            parts = data.split(self.layout.elements(chunk))
            for piece in self.layout.pieces(chunk):
                yield piece, [place(piece, part) for part in parts]
