"""Files of a pinned generation in a remote tier."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash

from iobench.checkpoint.checksums import record_of
from iobench.checkpoint.manifest import FileRecord, Manifest, PinnedGeneration
from iobench.checkpoint.piece_reader import PieceReader, StoredPiece
from iobench.errors import DataMismatchError
from iobench.offload.convert import ExportedState
from iobench.offload.layout import ParameterSpec, StateLayout
from iobench.units import GIB
from iobench.writers.base import StoredReader
from iobench.writers.buffered import BufferedWriter
from iobench.writers.image import Bytes, FileImage

_TEXT = (
    b'{"schema": "iobench.offload.export/1", "layout": {}, "updates": 1, "counts": [1], '
    b'"groups": []}'
)
_LAYOUT = StateLayout.plan(
    [ParameterSpec(name="w", shape=(3,), dtype="float32", group=0)], pins=1, memory_bytes=GIB
).to_json()


def test_a_file_that_is_larger_than_memory(tmp_path: Path) -> None:
    """A chunk of it takes the memory of that chunk: no address space for the whole file."""
    size, digest = 1024 * GIB, xxhash.xxh3_64_hexdigest(b"bytes")
    with (tmp_path / "optimizer-state").open("wb") as file:
        file.truncate(size)
        for offset in (0, size // 2, size - 5):
            file.seek(offset)
            file.write(b"bytes")
    files = {"optimizer-state": FileRecord(path="optimizer-state", size_bytes=size, pieces=())}
    for offset in (0, size // 2, size - 5):
        piece = StoredPiece("optimizer-state", offset, offset + 5, digest, "chunk")
        found: list[bytes] = []

        def deliver(_: StoredPiece, data: Bytes, found: list[bytes] = found) -> bool:
            found.append(bytes(data))
            return False

        PieceReader().read(StoredReader(BufferedWriter(), tmp_path), files, [piece], deliver)
        assert found == [b"bytes"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "cannot be read"),
        (b"[]", "Expected `object`, got `array`"),
        (b'{"schema": "iobench.offload.export/2"}', "Invalid enum value"),
        (b'{"schema": "iobench.offload.export/1", "layout": {}}', "missing required field"),
        (_TEXT.replace(b"[1]", b'["1"]'), "Expected `int`, got `str`"),
        (_TEXT.replace(b"[1]", b"[-1]"), "cannot be read"),
        (_TEXT, "not a layout of offload state"),
        (_TEXT.replace(b'"layout": {}', b'"layout": ' + _LAYOUT.encode()), "another file"),
    ],
)
def test_a_description_that_no_save_has_written(tmp_path: Path, text: bytes, message: str) -> None:
    """Its checksum is right: a load goes on to another copy, as with other damage."""
    writer, image = BufferedWriter(), FileImage.of("optimizer.json", [text])
    writer.write(image, tmp_path)
    manifest = Manifest(
        step=1,
        created_s=0.0,
        world_size=1,
        iobench="",
        writer={},
        format="safetensors",
        files=(record_of(image, [("", image.size_bytes)]),),
        offload=PinnedGeneration(
            directory="/state",
            pin="p",
            generation=1,
            updates=1,
            files=(FileRecord(path="optimizer-state", size_bytes=0, pieces=()),),
        ),
    )
    with pytest.raises(DataMismatchError, match=message) as caught:
        ExportedState(manifest, tmp_path, writer)
    assert "optimizer.json" in str(caught.value)
