"""Reads one checkpoint, whether one process or several ranks saved it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from iobench.checkpoint.compared import read_compared, read_file
from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.rebuild import readable, unflatten
from iobench.checkpoint.serialized import FORMAT, SKELETON, TENSORS
from iobench.errors import DataMismatchError
from iobench.formats import safetensors
from iobench.formats.collector import collector_paused
from iobench.writers.copy_reader import CopyReader
from iobench.writers.transfer import Transfer

if TYPE_CHECKING:
    from iobench.checkpoint.load.reader import PieceReader
    from iobench.checkpoint.ranked.stock_values import StatePath

__all__ = ["read_any"]


def read_any(
    copy: CopyReader,
    where: str,
    manifest: Manifest,
    like: Any,
    *,
    rank: int = 0,
    ranks: int = 1,
    reader: PieceReader | None = None,
    elsewhere: Collection[StatePath] = (),
) -> tuple[Any, Transfer]:
    """Return the state for `rank` of `ranks`, and the transfer of its tensors.

    `copy` reads the files, which `manifest` describes; messages name `where`. `reader` fetches the
    pieces that this rank needs; by default it reads them itself. A checkpoint of one process is
    read as one file by a rank that is alone, and where tensors share memory in parts, as a slice
    and its base. `elsewhere` are the paths of tensors that only the `like` of other ranks has: this
    rank does not get them. Every byte that is used is compared with its checksum. Raises what
    `restore` raises.
    """
    if manifest.format == "dcp" or (manifest.format == FORMAT and (ranks > 1 or _shards(like))):
        from iobench.checkpoint.load.pieces import read_pieces
        from iobench.checkpoint.load.stored import stored_state

        stored = stored_state(copy, manifest)
        if not stored.has_views:
            return read_pieces(
                copy,
                where,
                stored,
                like,
                rank=rank,
                ranks=ranks,
                reader=reader,
                elsewhere=elsewhere,
            )

    def own_part(state: Any) -> Any:
        if not elsewhere:
            return state
        from iobench.checkpoint.load.elsewhere import without

        return without(state, like, elsewhere, where)

    state, transfer = _read_plain(copy, where, manifest, like, own_part, rank=rank, ranks=ranks)
    if like is not None:
        from iobench.checkpoint.load.like import resharded

        state = resharded(state, like)
    return state, transfer


def _shards(like: Any) -> bool:
    """Whether a state has a DTensor."""
    if like is None:
        return False
    from iobench.checkpoint.load.like import is_sharded, tensors_of

    return any(is_sharded(value) for _, value in tensors_of(like))


def _read_plain(
    copy: CopyReader,
    where: str,
    manifest: Manifest,
    like: Any,
    select: Callable[[Any], Any],
    *,
    rank: int,
    ranks: int,
) -> tuple[Any, Transfer]:
    """Return the state of the checkpoint that one process saved, and the transfer of its tensors.

    It is for `rank` of `ranks`, see `PerRank`. `select` returns the part of the state that is
    compared with `like` and returned.
    """
    if manifest.format != FORMAT:
        raise DataMismatchError(f"{where} has the unknown format {manifest.format!r}")
    text = read_file(copy, manifest.file(SKELETON))
    tensors, image = safetensors.prepare(TENSORS, copy.location, copy)
    with collector_paused():
        with readable(os.path.join(copy.location, SKELETON)):
            state = unflatten(_parsed(text), tensors, rank=rank, ranks=ranks)
        state = select(state)
    if like is not None:
        from iobench.checkpoint.load.like import compare_state

        compare_state(like, state, where)
    return state, read_compared(copy, image, manifest.file(TENSORS))


def _parsed(text: bytes) -> Any:
    """Return the skeleton in `text`."""
    with suppress(ValueError, RecursionError):  # such as half of a surrogate pair
        return msgspec.json.decode(text)  # in half of the time of `json`
    return json.loads(text)
