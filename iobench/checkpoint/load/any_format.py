"""Reads one checkpoint, whether one process or several ranks saved it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.restore import FORMAT, OnCorrupt, read_plain, restore
from iobench.checkpoint.store import CheckpointStore, store_at
from iobench.writers.base import Writer
from iobench.writers.config import load_writer
from iobench.writers.transfer import Transfer

if TYPE_CHECKING:
    from collections.abc import Collection

    from iobench.checkpoint.load.reader import PieceReader
    from iobench.checkpoint.ranked.stock_values import StatePath

__all__ = ["load_checkpoint", "read_any"]


def load_checkpoint(
    location: str | Path,
    step: int | Literal["latest"] = "latest",
    *,
    writer: Writer | str = "hybrid",
    on_corrupt: OnCorrupt = "raise",
    like: Any = None,
) -> Any:
    """Return the state of a checkpoint in `location`, also while a Checkpointer writes there.

    For evaluation and export: it takes no lock, asks no other rank and changes nothing. It reads
    checkpoints of one process and of several ranks. See `Checkpointer.load`.
    """
    chosen = load_writer(writer) if isinstance(writer, str) else writer
    store = store_at(location, chosen)
    return restore(store, chosen, step, on_corrupt=on_corrupt, like=like, read=read_any)[0]


def read_any(
    store: CheckpointStore,
    writer: Writer,
    step: int,
    manifest: Manifest,
    like: Any,
    *,
    rank: int = 0,
    ranks: int = 1,
    reader: PieceReader | None = None,
    elsewhere: Collection[StatePath] = (),
) -> tuple[Any, Transfer]:
    """Return the state for `rank` of `ranks`, and the transfer of its tensors.

    `reader` fetches the pieces that this rank needs; by default it reads them itself. A checkpoint
    of one process is read as one file by a rank that is alone, and where tensors share memory in
    parts, as a slice and its base. `elsewhere` are the paths of tensors that only the `like` of
    other ranks has: this rank does not get them. Every byte that is used is compared with its
    checksum. Raises what `restore` raises.
    """
    if manifest.format == "dcp" or (manifest.format == FORMAT and (ranks > 1 or _shards(like))):
        from iobench.checkpoint.load.pieces import read_pieces
        from iobench.checkpoint.load.stored import stored_state

        stored = stored_state(store, writer, step, manifest)
        if not stored.has_views:
            return read_pieces(
                store,
                writer,
                step,
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

        return without(state, like, elsewhere, f"{store}: step {step}")

    state, transfer = read_plain(
        store, writer, step, manifest, like, rank=rank, ranks=ranks, select=own_part
    )
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
