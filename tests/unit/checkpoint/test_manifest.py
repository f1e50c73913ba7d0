"""Manifest and checksums: the content of a checkpoint, and how damage is found."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from iobench.checkpoint import checksums
from iobench.checkpoint.checksums import record_of
from iobench.checkpoint.manifest import (
    SCHEMA,
    FileRecord,
    Manifest,
    Piece,
    Pieces,
    _canonical,
    _checksum,
)
from iobench.errors import DataMismatchError
from iobench.writers.image import FileImage

_DATA = np.arange(100, dtype=np.uint8)
_IMAGE = FileImage.of("file", [_DATA[:30].copy(), _DATA[30:].copy()])
_RECORD = record_of(_IMAGE, [("", 8), ("a", 50), ("empty", 0), ("b", 42)])
_MANIFEST = Manifest(
    step=3,
    created_s=12.5,
    world_size=1,
    iobench="0",
    writer={"name": "buffered", "options": {"threads": 1}},
    format="safetensors",
    files=(_RECORD,),
)


def test_text() -> None:
    """The text is the one that json.dumps makes, odd names and files without pieces included, and
    a manifest comes back from it as it was."""
    odd = FileRecord(path='"\n', size_bytes=3, pieces=(Piece('ä"\\', 3, "0" * 16),))
    empty = FileRecord(path="e", size_bytes=0, pieces=())
    for files in ((), (empty,), (_RECORD, odd, empty), (replace(odd, path="pieces"), odd)):
        manifest = replace(_MANIFEST, files=files)
        document = json.loads(manifest.to_json())
        assert manifest.to_json() == _canonical(document).encode()
        assert document.pop("xxh3_64") == _checksum(document)
        assert Manifest.parse(manifest.to_json(), "m") == manifest
    assert (_MANIFEST.size_bytes, _MANIFEST.file("file")) == (100, _RECORD)


@given(st.data(), st.booleans())
def test_any_change_shows(data: st.DataObject, files: bool) -> None:
    """A manifest with a bit changed, or cut, is refused or says just the same: with its files and
    without, in text of this version and of older ones."""
    want = _MANIFEST if files else replace(_MANIFEST, files=())
    now = _MANIFEST.to_json()
    text = data.draw(st.sampled_from([now, json.dumps(json.loads(now), indent=1).encode()]))
    assert Manifest.parse(text, "m", files=files) == want
    damaged = bytearray(text)
    at = data.draw(st.integers(0, len(damaged) - 1))
    if data.draw(st.booleans()):
        del damaged[at:]
    else:
        damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        assert Manifest.parse(bytes(damaged), "m", files=files) == want
    except DataMismatchError:
        return


_HOSTILE = st.sampled_from(
    [None, True, -1, 1, 1.5, 2**63, "", "../..", "\ud800", [], [1], {}, {"a": 1}, float("inf")]
)


@given(st.data())
def test_a_hostile_value(data: st.DataObject) -> None:
    """Whatever value is replaced, with a right checksum: it is refused, or of the right type."""
    document = json.loads(_MANIFEST.to_json())
    at: Any = document
    while isinstance(at, dict) and (key := data.draw(st.sampled_from(sorted(at)))):
        inner = at[key]
        if isinstance(inner, (list, tuple)):
            at[key] = [dict(one) for one in inner]
            inner = at[key][0]
        if not isinstance(inner, dict) or data.draw(st.booleans()):
            at[key] = data.draw(_HOSTILE)
            break
        at = inner
    document.pop("xxh3_64", None)
    text = json.dumps({**document, "xxh3_64": _checksum(document)})
    try:
        signed = {**document, "xxh3_64": _checksum(document)}
        Manifest.parse(_canonical(signed).encode(), "m", files=False)
        found = Manifest.parse(text.encode(), "m")
    except DataMismatchError:
        return
    types = {name: type(value) for name, value in asdict(found).items() if name != "created_s"}
    assert types == {
        name: type(value) for name, value in asdict(_MANIFEST).items() if name in types
    }
    assert found.size_bytes >= 0


def test_what_is_refused() -> None:
    """A manifest of a later version, by name; a lone surrogate, escaped or raw: it could be neither
    printed nor opened."""
    document = {**json.loads(_MANIFEST.to_json()), "schema": "iobench.checkpoint/9"}
    with pytest.raises(DataMismatchError, match=f"checkpoint/9.*{SCHEMA}"):
        Manifest.parse(json.dumps(document).encode(), "m")
    escaped = replace(_MANIFEST, files=(replace(_RECORD, path="\ud800"),)).to_json()
    for text in (escaped, escaped.replace(b"\\ud800", b"\xed\xa0\x80")):
        with pytest.raises(DataMismatchError, match="not the manifest of a checkpoint"):
            Manifest.parse(text, "m")


@given(st.lists(st.integers(0, 40), max_size=12), st.data())
def test_pieces_of_every_size(sizes: list[int], data: st.DataObject) -> None:
    """Each checksum is that of the piece alone, however segments and pieces are cut."""
    bytes_ = np.arange(sum(sizes), dtype=np.uint8)
    cuts = data.draw(st.lists(st.integers(0, len(bytes_)), max_size=4))
    segments = np.split(bytes_, sorted(cuts) if data.draw(st.booleans()) else np.cumsum(sizes))
    image = FileImage.of("file", segments)
    with mock.patch.object(checksums, "_RUN", data.draw(st.integers(1, 100))):
        record = record_of(image, [(str(number), size) for number, size in enumerate(sizes)])
    ends = np.cumsum(sizes)
    assert [piece.xxh3_64 for piece in record.pieces] == [
        xxhash.xxh3_64_hexdigest(bytes_[end - size : end])
        for size, end in zip(sizes, ends, strict=True)
    ]


@given(st.lists(st.tuples(st.text(), st.integers(0, 2**40))))
def test_the_text_of_pieces(pieces: list[tuple[str, int]]) -> None:
    """Made once and filled with other checksums, it is what json makes."""
    text = Pieces(pieces)
    for seed in range(2):
        digests = [xxhash.xxh3_64_hexdigest(bytes([seed, at % 256])) for at in range(len(pieces))]
        listed = tuple(Piece(*piece, digest) for piece, digest in zip(pieces, digests, strict=True))
        record = FileRecord(path="a", size_bytes=1, pieces=listed)
        manifest = replace(_MANIFEST, files=(_RECORD, record))
        assert text.json(digests) == record.pieces_json()
        assert json.loads(record.pieces_json()) == list(map(asdict, listed))
        assert b"".join(manifest.json_parts({"a": record.pieces_json()})) == manifest.to_json()
