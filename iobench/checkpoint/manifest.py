"""Manifest: the contents of a checkpoint. It is written last and makes a checkpoint complete."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from json.encoder import encode_basestring_ascii as _quoted
from operator import itemgetter
from typing import Any, NamedTuple

import xxhash

from iobench.errors import DataMismatchError
from iobench.formats.collector import collector_paused
from iobench.text import parse_json

__all__ = ["SCHEMA", "FileRecord", "Manifest", "Piece"]

SCHEMA = "iobench.checkpoint/1"

_PIECE = '{"name":%s,"size_bytes":%d,"xxh3_64":%s}'
_CHECKSUM = ',"xxh3_64":"'
_FILES, _AFTER_FILES = b'"files":[', b'],"format":'


class Piece(NamedTuple):
    """Consecutive bytes of a file, usually one tensor, and their XXH3-64 in hex.

    A NamedTuple, because it is cheap to make: a checkpoint may have 100,000 of them.
    """

    name: str
    size_bytes: int
    xxh3_64: str


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """A file of the checkpoint. `path` is relative to the checkpoint; pieces have no gaps."""

    path: str
    size_bytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """`created_s` is in seconds since the epoch; `writer` has the name and options of the writer.

    Among the checkpoints of one run, the last saved one has the greatest `serial`. A manifest
    without a serial, of an older version, counts as 0.
    """

    step: int
    created_s: float
    world_size: int
    iobench: str
    writer: Mapping[str, Any]
    format: str
    files: tuple[FileRecord, ...]
    serial: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all files except the manifest."""
        return sum(file.size_bytes for file in self.files)

    def file(self, path: str) -> FileRecord:
        """Return the record of the file `path`. Raises DataMismatchError when there is none."""
        for file in self.files:
            if file.path == path:
                return file
        raise DataMismatchError(f"the manifest names no file {path!r}")

    def to_json(self) -> str:
        """Return the JSON document, with a checksum of itself.

        It is the text that the checksum covers, with the checksum as its last key: a reader can
        compare it without a parse. The pieces are formatted here: there may be 100,000.
        """
        marks = [secrets.token_hex(16) for _ in self.files]
        document: dict[str, Any] = {
            "schema": SCHEMA,
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "files": [
                {"path": file.path, "size_bytes": file.size_bytes, "pieces": mark}
                for file, mark in zip(self.files, marks, strict=True)
            ],
        }
        text = _canonical(document)
        for mark, file in zip(marks, self.files, strict=True):
            pieces = [
                _PIECE % (_quoted(name), size, _quoted(sum_)) for name, size, sum_ in file.pieces
            ]
            text = text.replace(f'"{mark}"', f"[{','.join(pieces)}]")
        return f'{text[:-1]}{_CHECKSUM}{xxhash.xxh3_64_hexdigest(text.encode())}"}}'

    @classmethod
    @collector_paused()
    def parse(cls, text: bytes, where: str, *, files: bool = True) -> Manifest:
        """Return the manifest in `text`. Raises DataMismatchError for damage or another schema.

        Without `files` it has none, but the checksum of all bytes is compared.
        """
        try:
            sound = _is_sound(text)
            document = parse_json(_without_files(text) if sound and not files else text)
            if document["schema"] != SCHEMA:
                raise DataMismatchError(
                    f"{where}: schema {document['schema']!r}, this iobench reads {SCHEMA!r}"
                )
            expected = document.pop("xxh3_64")
            if not sound and _checksum(document) != expected:
                raise DataMismatchError(f"{where}: damaged, its checksum is not {expected}")
            return cls._from(document if files else {**document, "files": []})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataMismatchError(
                f"{where}: not the manifest of a checkpoint ({error!r})"
            ) from error

    @classmethod
    def _from(cls, document: dict[str, Any]) -> Manifest:
        del document["schema"]
        files = [
            FileRecord(**{**file, "pieces": _pieces(file["pieces"])})
            for file in document.pop("files")
        ]
        made = cls(files=tuple(files), **document)
        made._check()
        return made

    def _check(self) -> None:
        """Raise TypeError for a wrong type. A hostile file can have a correct checksum."""
        counts: list[Any] = [self.step, self.world_size, self.serial]
        texts: list[object] = [self.iobench, self.format]
        for file in self.files:
            counts += [file.size_bytes, *[piece.size_bytes for piece in file.pieces]]
            texts += [file.path, *[piece.name for piece in file.pieces]]
            texts += [piece.xxh3_64 for piece in file.pieces]
        sound = set(map(type, counts)) == {int} and set(map(type, texts)) == {str}
        sound = sound and type(self.created_s) in (int, float) and isinstance(self.writer, dict)
        if not sound or min(counts) < 0 or max(counts) >= 2**63:
            raise TypeError("a value of the wrong type or range")


_values = itemgetter(*Piece._fields)


def _pieces(listed: list[dict[str, Any]]) -> tuple[Piece, ...]:
    """Return the pieces of a file without a call of Python for each. Raises KeyError, TypeError."""
    if not set(map(len, listed)) <= {len(Piece._fields)}:
        raise TypeError("a piece with other keys")
    return tuple(map(partial(tuple.__new__, Piece), map(_values, listed)))


def _checksum(document: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(_canonical(document).encode())


def _canonical(document: Mapping[str, Any]) -> str:
    """Return the text that the checksum covers."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def _is_sound(text: bytes) -> bool:
    """Whether the checksum at the end of `text` is that of the rest.

    It is not for damaged text, nor for another form of the document, as older versions wrote it.
    """
    rest, _, end = text.rpartition(_CHECKSUM.encode())
    checksum = xxhash.xxh3_64(rest)
    checksum.update(b"}")
    return end == f'{checksum.hexdigest()}"}}'.encode()


def _without_files(text: bytes) -> bytes:
    """Return the sound manifest `text` with an empty list of files, or as it is.

    A thousand manifests of 900 tensors take 0.1 s instead of 1.4 s.
    """
    begin = text.find(_FILES) + len(_FILES)
    after = text.find(_AFTER_FILES, begin)
    return text if after < begin else text[:begin] + text[after:]
