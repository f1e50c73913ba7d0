"""Manifest: the contents of a checkpoint. It is written last and makes a checkpoint complete.

The names of checkpoints, and the pieces of their files, are defined here too.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from json.encoder import encode_basestring_ascii as quoted
from typing import Annotated, Any

import msgspec
import xxhash

from iobench.errors import DataMismatchError
from iobench.formats.collector import collector_paused
from iobench.text import parse_json


class Pieces:
    """Consecutive pieces of a file, usually one tensor each. The next save may use it too."""

    def __init__(self, pieces: Sequence[tuple[str, int]]) -> None:
        """`pieces` are (name, bytes); they follow one another without gaps."""
        self.names = [name for name, _ in pieces]
        self.sizes = [size for _, size in pieces]
        self.ends = list(itertools.accumulate(self.sizes))
        self.begins = [0, *self.ends[:-1]]
        self.largest_bytes = max(self.sizes, default=0)

    def __len__(self) -> int:
        return len(self.sizes)

    def json(self, checksums: Sequence[str]) -> bytes:
        """Return the pieces as JSON for a manifest, with their `checksums` in order.

        A checksum is ASCII without a quotation mark or a backslash.
        """
        parts = [""] * (2 * len(checksums) + 1)
        parts[::2], parts[1::2] = self._texts, checksums
        return "".join(parts).encode("ascii")

    @functools.cached_property
    def _texts(self) -> list[str]:
        """The JSON around the checksums."""
        texts = [
            f'"}},{{"name":{quoted(name)},"size_bytes":{size},"xxh3_64":"'
            for name, size in zip(self.names, self.sizes, strict=True)
        ]
        if not texts:
            return ["[]"]
        return ["[" + texts[0].removeprefix('"},'), *texts[1:], '"}]']


_STEP = re.compile(r"step-(0|[1-9][0-9]*)")


def name_of(step: int) -> str:
    """Return the name of the checkpoint of `step`, such as `step-20`."""
    return f"step-{step}"


def step_of(name: str) -> int | None:
    """Return the step in the name of a checkpoint; None for another name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


SCHEMA = "iobench.checkpoint/1"
MANIFEST = "manifest.json"
"""File that describes the checkpoint; written last."""

_CHECKSUM = ',"xxh3_64":"'
_FILES, _AFTER_FILES = b'"files":[', b'],"format":'


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""Bytes or a number, checked by a parse: a hostile file can have a correct checksum."""


class Piece(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Consecutive bytes of a file, usually one tensor, and their XXH3-64 in hex.

    A Struct, like all of a manifest: a checkpoint may have 100,000 pieces. `msgspec` parses and
    checks them in a fifth of the time of `json`.
    """

    name: str
    size_bytes: _Count
    xxh3_64: str


class FileRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of the checkpoint. `path` is relative to the checkpoint; pieces have no gaps."""

    path: str
    size_bytes: _Count
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        """Raise ValueError for a path that could lead out of the checkpoint's directory.

        Loads that copy a checkpoint make directories for the paths of its manifest, and a manifest
        in a bucket may come from anyone who can write there.
        """
        parts = self.path.split("/")
        if "\0" in self.path or not {"", ".", ".."}.isdisjoint(parts):
            raise ValueError(f"path {self.path!r}: must be relative, without '.', '..' and NUL")

    def pieces_json(self) -> bytes:
        """Return the pieces as JSON."""
        pieces = Pieces([(piece.name, piece.size_bytes) for piece in self.pieces])
        return pieces.json([quoted(piece.xxh3_64)[1:-1] for piece in self.pieces])


class PinnedGeneration(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Optimizer state on storage that belongs to the checkpoint: a generation, kept by a pin.

    `directory` had it when it was saved. `updates` counts the optimizer's steps. `files` are made
    of it in a remote tier; the local one does not have them.
    """

    directory: str
    pin: str
    generation: _Count
    updates: _Count
    files: tuple[FileRecord, ...] = ()


class Manifest(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="schema",
    tag=SCHEMA,
):
    """`created_s` is in seconds since the epoch; `writer` has the name and options of the writer.

    Among the checkpoints of one run, the last saved one has the greatest `serial`. A manifest
    without a serial, of an older version, counts as 0. `attempt` is the random name of one save of
    several ranks, which replicas of it in memory have too. `offload` is the optimizer's state, if
    it is not in the files.
    """

    step: _Count
    created_s: float
    world_size: _Count
    iobench: str
    writer: Mapping[str, Any]
    format: str
    files: tuple[FileRecord, ...]
    serial: _Count = 0
    attempt: str = ""
    offload: PinnedGeneration | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for two files of one path, and for one with that of the manifest."""
        paths = [MANIFEST, *(file.path for file in self.remote_files)]
        if len(set(paths)) < len(paths):
            twice = max(paths, key=paths.count)
            raise ValueError(f"path {twice!r}: a checkpoint has one file of this name")

    @property
    def pinned(self) -> tuple[PinnedGeneration, ...]:
        """The optimizer's state; empty if it is in the files."""
        return () if self.offload is None else (self.offload,)

    @property
    def size_bytes(self) -> int:
        """Bytes of all files except the manifest."""
        return sum(file.size_bytes for file in self.files)

    @property
    def remote_files(self) -> tuple[FileRecord, ...]:
        """All files that the checkpoint has in a remote tier."""
        return (*self.files, *(file for one in self.pinned for file in one.files))

    def file(self, path: str) -> FileRecord:
        """Return the record of the file `path`. Raises DataMismatchError when there is none."""
        for file in self.files:
            if file.path == path:
                return file
        raise DataMismatchError(f"the manifest names no file {path!r}")

    def to_json(self) -> bytes:
        """Return the JSON document, with a checksum of itself; see `json_parts`."""
        return b"".join(self.json_parts())

    def json_parts(self, pieces: Mapping[str, bytes] | None = None) -> list[bytes]:
        """Return the JSON document in parts, with a checksum of itself.

        It is the text that the checksum covers, with the checksum as its last key: a reader can
        compare it without a parse. The pieces are formatted apart: there may be 100,000, and no
        copy of their text is made here. `pieces` has the `pieces_json` of files, by path, where it
        was made already.
        """
        marks = [secrets.token_hex(16) for _ in self.files]
        document: dict[str, Any] = {
            "schema": SCHEMA,
            **msgspec.structs.asdict(self),
            "files": [
                {"path": file.path, "size_bytes": file.size_bytes, "pieces": mark}
                for file, mark in zip(self.files, marks, strict=True)
            ],
        }
        if not self.attempt:
            del document["attempt"]
        if self.offload is None:
            del document["offload"]
        else:
            document["offload"] = msgspec.to_builtins(self.offload)
        made, parts, rest = pieces or {}, list[bytes](), _canonical(document).encode()
        for mark, file in zip(marks, self.files, strict=True):
            before, _, rest = rest.partition(f'"{mark}"'.encode())
            parts += [before, made.get(file.path) or file.pieces_json()]
        parts.append(rest)
        digest = xxhash.xxh3_64()
        for part in parts:
            digest.update(part)
        parts[-1] = rest[:-1] + f'{_CHECKSUM}{digest.hexdigest()}"}}'.encode()
        return parts

    @classmethod
    @collector_paused()
    def parse(cls, text: bytes, where: str, *, files: bool = True) -> Manifest:
        """Return the manifest in `text`. Raises DataMismatchError for damage or another schema.

        Without `files` it has none, but the checksum of all bytes is compared.
        """
        signed = _signed(text)
        if signed is not None:
            with suppress(ValueError, RecursionError):  # the parse below says what is wrong
                return _parse(signed if files else _without_files(signed))
        try:
            document = parse_json(text)
            if document["schema"] != SCHEMA:
                raise DataMismatchError(
                    f"{where}: schema {document['schema']!r}, this iobench reads {SCHEMA!r}"
                )
            expected = document.pop("xxh3_64")
            if signed is None and _checksum(document) != expected:
                raise DataMismatchError(f"{where}: damaged, its checksum is not {expected}")
            return msgspec.convert(document if files else {**document, "files": []}, cls)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataMismatchError(
                f"{where}: not the manifest of a checkpoint ({error!r})"
            ) from error


_parse = msgspec.json.Decoder(Manifest).decode


def _checksum(document: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(_canonical(document).encode())


def _canonical(document: Mapping[str, Any]) -> str:
    """Return the text that the checksum covers."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def _signed(text: bytes) -> bytes | None:
    """Return the document without the checksum at its end; None if this is not its checksum.

    It is not for damaged text, nor for another form of the document, as older versions wrote it.
    """
    rest, _, end = text.rpartition(_CHECKSUM.encode())
    signed = rest + b"}"
    return signed if end == f'{xxhash.xxh3_64_hexdigest(signed)}"}}'.encode() else None


def _without_files(signed: bytes) -> bytes:
    """Return the signed text of a manifest with an empty list of files, or as it is.

    A thousand manifests of 900 tensors take 0.1 s instead of 1.4 s.
    """
    begin = signed.find(_FILES) + len(_FILES)
    after = signed.find(_AFTER_FILES, begin)
    return signed if after < begin else signed[:begin] + signed[after:]
