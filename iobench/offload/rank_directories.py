"""The directories of the ranks' parts of a sharded state, and which number of ranks goes on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from iobench.errors import DataMismatchError, TargetError, transfer_errors
from iobench.offload.files import LAYOUT, read_layout
from iobench.offload.record import GenerationRecord
from iobench.offload.record_areas import read_records
from iobench.regular_file import read_regular
from iobench.writers.local.new_file import sync_directory, write_bytes

__all__ = [
    *("NotedSize", "complete_sizes", "directories", "forget_size", "is_elsewhere"),
    *("is_rank_directory", "note_size", "noted_size", "rank_directory", "records_in"),
]

_NAME = re.compile(r"rank-(\d+)-of-(\d+)")
_NOTE = "ranks.json"


class NotedSize(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The number of ranks whose directories have the state that training goes on from.

    It is noted where directories of several numbers of ranks exist. `pins` are held pins, one for
    each rank; without them the newest state counts.
    """

    size: int
    pins: tuple[str, ...] = ()


def rank_directory(rank: int, size: int) -> str:
    """Return the name of the directory of one rank."""
    return f"rank-{rank}-of-{size}"


def is_rank_directory(name: str) -> bool:
    """Return whether `name` is that of the directory of a rank."""
    return bool(_NAME.fullmatch(name))


def directories(base: Path) -> dict[int, set[int]]:
    """Return the ranks that have a directory in `base`, for each number of ranks."""
    found: dict[int, set[int]] = {}
    for path in base.iterdir() if base.is_dir() else ():
        if match := _NAME.fullmatch(path.name):
            found.setdefault(int(match[2]), set()).add(int(match[1]))
    return found


def complete_sizes(base: Path) -> list[int]:
    """Return the numbers of ranks of which `base` has the files of all ranks."""
    return sorted(
        size
        for size, ranks in directories(base).items()
        if ranks == set(range(size))
        and all((base / rank_directory(rank, size) / LAYOUT).exists() for rank in ranks)
    )


def records_in(directory: Path) -> list[GenerationRecord]:
    """Return the valid records of one part, the newest first; none without a state."""
    if not (directory / LAYOUT).exists():
        return []
    try:
        return read_records(directory, read_layout(directory))
    except TargetError:  # of a newer version, or no layout
        return []


def noted_size(base: Path) -> NotedSize | None:
    """Return what `note_size` wrote. Raises DataMismatchError for a damaged file."""
    path = base / _NOTE
    try:
        with transfer_errors("reading", path):
            data = read_regular(path) if path.exists() else b""
        return msgspec.json.decode(data, type=NotedSize) if data else None
    except msgspec.DecodeError as error:
        raise DataMismatchError(f"{path}: not the size of a job ({error})") from error


def is_elsewhere(base: Path, size: int) -> bool | None:
    """Return whether the state is in the directories of another number of ranks than `size`.

    None where nothing says so: only if these have no generation.
    """
    noted = noted_size(base)
    if noted is not None:
        return noted.size != size
    return None if set(complete_sizes(base)) - {size} else False


def note_size(base: Path, size: int, pins: Sequence[str] = ()) -> None:
    """Note durably that the state is in the directories of `size` ranks."""
    with transfer_errors("writing", base / _NOTE):
        write_bytes(base / _NOTE, msgspec.json.encode(NotedSize(size, tuple(pins))))


def forget_size(base: Path) -> None:
    """Remove the note, durably: there is one number of ranks."""
    path = base / _NOTE
    with transfer_errors("removing", path):
        if path.exists():
            path.unlink()
            sync_directory(base)
