"""fill_local: copies a checkpoint of the remote tier to the local tier, for the next restore."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from iobench import linux
from iobench.checkpoint.compared import compared
from iobench.checkpoint.manifest import FileRecord, Manifest
from iobench.checkpoint.staged import StagedCheckpoint
from iobench.checkpoint.store import DirectoryStore
from iobench.errors import TransferError, transfer_errors
from iobench.units import MIB, format_size
from iobench.writers.base import Writer
from iobench.writers.blocks.channel import Channel, Lease
from iobench.writers.blocks.pages import fresh_pages
from iobench.writers.image import FileImage
from iobench.writers.local.new_file import make_directories
from iobench.writers.stream import Stream

__all__ = ["fill_files", "fill_local", "staged_locally"]

_BLOCK_BYTES = 64 * MIB


def fill_local(
    local: DirectoryStore,
    local_writer: Writer,
    manifest: Manifest,
    location: str | Path,
    remote_writer: Writer,
) -> None:
    """Copy the checkpoint at `location` of the remote tier to `local`. It is durable on return.

    It becomes visible as a whole, with the same manifest, after every piece was compared with its
    checksum. It replaces a checkpoint of the same step. Memory of three blocks of 64 MiB is
    enough. Raises DataMismatchError for a damaged remote copy, and TransferError; then nothing of
    it is visible, and a start removes what a killed process has left.
    """
    with staged_locally(local, manifest) as staged:
        fill_files(manifest.files, location, remote_writer, staged.directory, local_writer)
        staged.publish([manifest.to_json()])


def staged_locally(local: DirectoryStore, manifest: Manifest) -> StagedCheckpoint:
    """Return the hidden directory of a checkpoint to be filled. Raises TransferError: no room."""
    free = _free_bytes(local.directory)
    if free < manifest.size_bytes:
        raise TransferError(
            f"{local.directory}: {format_size(free)} are free, the checkpoint has "
            f"{format_size(manifest.size_bytes)}"
        )
    return StagedCheckpoint(local.locate(manifest.step), replace=True, lock=local.lock)


def fill_files(
    files: Iterable[FileRecord],
    location: str | Path,
    remote_writer: Writer,
    directory: Path,
    local_writer: Writer,
) -> None:
    """Copy `files` at `location` of the remote tier to `directory`, durable on return."""
    for record in files:
        target = directory / record.path
        with transfer_errors("copying to", target):
            make_directories(target.parent)
        with local_writer.open(target, record.size_bytes) as stream:
            _copy(record, location, remote_writer, stream)


def _copy(record: FileRecord, location: str | Path, writer: Writer, stream: Stream) -> None:
    """Write a file to `stream`, while the next block is read."""
    # Address space for the whole file. Pages take memory from the read to the write of a block.
    memory = fresh_pages(record.size_bytes, huge=False)
    image = FileImage.of(record.path, [memory])

    def write(part: tuple[int, int]) -> None:
        start, stop = part
        stream.write(memory[start:stop])
        linux.give_up_pages(memory.ctypes.data + start, stop - start)

    written: Channel[tuple[int, int]] = Channel(
        lambda: written.serve(write), name="iobench-warm", limit=2
    )
    try:
        with compared(image, record, os.path.join(location, record.path)) as incoming:
            for start in range(0, record.size_bytes, _BLOCK_BYTES):
                stop = min(start + _BLOCK_BYTES, record.size_bytes)
                writer.read(incoming, location, start=start, stop=stop)
                incoming.filled(start, stop)  # here: its pages are given up soon
                written.submit(Lease((start, stop)))
        written.drain()
    finally:
        written.close(drop=True)


def _free_bytes(directory: Path) -> int:
    with transfer_errors("measuring", directory):
        found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize
