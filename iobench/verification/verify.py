"""verify: whether the checkpoints at a path are whole, and what could not be proved."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import xxhash

from iobench._version import __version__
from iobench.checkpoint.manifest import FileRecord, Manifest, Piece
from iobench.errors import DataMismatchError, TransferError, UsageError
from iobench.verification.directories import SIDECAR, add_record, inventory_of
from iobench.verification.file_tree import FileTree, unreadable
from iobench.verification.inventory import (
    CheckedRange,
    ListedFile,
    VerifyInventory,
    VerifyReport,
)
from iobench.verification.reading import Layer, OnRead, read_all
from iobench.verification.values import ValueCounts
from iobench.writers.base import Writer
from iobench.writers.config import writer_of
from iobench.writers.image import FileImage
from iobench.writers.s3_store.target import is_s3


def verify(
    path: str | Path,
    *,
    writer: Writer | str | None = None,
    record: bool = False,
    values: bool = False,
    progress: OnRead | None = None,
) -> VerifyReport:
    """Read every byte of the checkpoints at `path`, and return what is wrong with them.

    `path` is a file, a directory or `s3://bucket/prefix`: checkpoints of iobench, safetensors and
    Hugging Face directories, files of torch.save (Lightning, DeepSpeed), DCP (Megatron). Only
    indexes are interpreted; nothing is unpickled that could run code. Checksums are compared where
    there are some, and `unproved` names the files without. `record` writes a file with the XXH3-64
    of every tensor next to them, if nothing is wrong; later calls compare it. `values` counts NaN,
    infinities and tensors of zeros.

    `writer` reads: a Writer, its name or a config; by default `hybrid`, and `s3` in a bucket.
    `progress` gets the bytes that were read and those to read. Raises UsageError if there is no
    checkpoint here, and TransferError. Nothing but the recorded file is changed.
    """
    began = time.perf_counter()
    location = FileTree(path, writer_for(path, writer))
    inventory = inventory_of(location)
    sidecar = f"{next(iter(location.sizes))}.{SIDECAR}" if location.single else SIDECAR
    recorded, counts = dict[str, _Recorder](), ValueCounts()
    if record:
        for name, size in location.sizes.items():
            if size >= 0 and name != sidecar:
                inventory.file(name)
    else:
        _add_recorded(inventory, sidecar)
    if not inventory.files and not inventory.findings:
        raise UsageError(
            f"{path}: no checkpoint was recognised; iobench verify reads checkpoints of iobench, "
            "*.safetensors, *.pt, *.pth, *.bin, *.ckpt and DCP directories"
        )

    def more(name: str, file: ListedFile) -> list[Layer]:
        layers = counts.layers(name, file) if values else []
        if record:
            recorded[name] = _Recorder(name, file)
            layers.append(recorded[name])
        return layers

    read_all(inventory, more, progress)
    counted = counts.summary(inventory) if values else None
    report = VerifyReport(
        findings=tuple(sorted(inventory.findings, key=lambda one: one.severity)),
        kinds=tuple(inventory.kinds),
        files=len(inventory.files),
        tensors=len(inventory.tensors),
        size_bytes=sum(one.size_bytes for one in inventory.files.values()),
        proved_bytes=sum(one.proved_bytes for one in inventory.files.values()),
        elapsed_s=time.perf_counter() - began,
        unproved=_unproved(inventory),
        values=counted,
    )
    if record and report.ok:
        _write(location, sidecar, [recorded[name].record for name in sorted(inventory.files)])
    return report


def writer_for(path: str | Path, writer: Writer | str | None) -> Writer:
    """Return `writer`, or the best one for `path`. Raises UsageError for an unknown one."""
    return writer_of(writer or ("s3" if is_s3(path) else "hybrid"))


def _unproved(inventory: VerifyInventory) -> dict[str, str]:
    """Return why files have no checksum, without those of which every byte has one."""
    return {
        path: why
        for path, why in sorted(inventory.unproved.items())
        if path in inventory.files
        and inventory.files[path].proved_bytes < inventory.files[path].size_bytes
    }


def _add_recorded(inventory: VerifyInventory, sidecar: str) -> None:
    """Add the checksums that an earlier call has recorded."""
    location = inventory.location
    try:
        if not location.single and sidecar not in location.sizes:
            return
        manifest = Manifest.parse(location.read(sidecar), sidecar)
    except (DataMismatchError, TransferError) as error:
        if location.single and isinstance(error, TransferError) and error.errno == errno.ENOENT:
            return
        inventory.error(sidecar, unreadable(error).removeprefix(f"{sidecar}: "))
        return
    for one in manifest.files:
        add_record(inventory, "", one)
    named = {one.path for one in manifest.files}
    for path in inventory.files:
        if path not in named:
            inventory.unproved[path] = f"is not in {sidecar}: it came later"


class _Recorder(Layer):
    """Computes the XXH3-64 of every tensor of a file, and of what is between them."""

    def __init__(self, path: str, file: ListedFile) -> None:
        ranges, end = [], 0
        for tensor, part in sorted(file.parts, key=lambda one: one[1].start):
            if part.strides is None and end <= part.start < part.stop:
                if end < part.start:
                    ranges.append(CheckedRange(end, part.start, ""))
                ranges.append(CheckedRange(part.start, part.stop, tensor.name))
                end = part.stop
        if end < file.size_bytes:
            ranges.append(CheckedRange(end, file.size_bytes, ""))
        super().__init__(ranges, lambda _: xxhash.xxh3_64(), self._add)
        self._path, self._size_bytes = path, file.size_bytes
        self._pieces: list[Piece] = []

    def _add(self, one: CheckedRange, digest: xxhash.xxh3_64) -> None:
        self._pieces.append(Piece(one.name, one.stop - one.start, digest.hexdigest()))

    @property
    def record(self) -> FileRecord:
        """The checksums, after all bytes were taken."""
        pieces = tuple(self._pieces)
        return FileRecord(path=self._path, size_bytes=self._size_bytes, pieces=pieces)


def _write(location: FileTree, sidecar: str, files: list[FileRecord]) -> None:
    manifest = Manifest(
        step=0,
        created_s=time.time(),
        world_size=1,
        iobench=__version__,
        writer={"name": location.writer.name, "options": {}},
        format="verify",
        files=tuple(files),
    )
    location.writer.write(FileImage.of(sidecar, [manifest.to_json()]), location.home)
