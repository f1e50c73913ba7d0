"""Replay: saves, restores and verifies a workload's files; tensors are windows of the pool."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from iobench.bench.data.digests import Digests
from iobench.bench.data.nested import flat, nested
from iobench.bench.data.payload_order import in_payload_order
from iobench.bench.data.pool import RandomPool, Window, Windows
from iobench.bench.data.restored import RestoredFile
from iobench.bench.data.subset import choose, read_some
from iobench.formats import raw, safetensors, torch_file, torch_image
from iobench.formats.tensors import tensor_from_bytes, torch_dtype
from iobench.results.records import Verified
from iobench.workloads.specs import SAFETENSORS_METADATA, FileFormat, FileSpec, TensorSpec
from iobench.writers.base import Writer
from iobench.writers.image import FileImage
from iobench.writers.registry import make
from iobench.writers.transfer import Transfer

__all__ = ["Replay"]


class Replay:
    """The files of one rank, replayed repeatedly, each time with new random bytes.

    `prepare` makes the bytes of the next checkpoint. `save` and `restore` move them through a
    writer; only these two are timed. `verify` compares the restored tensors with the saved ones.
    """

    def __init__(
        self,
        files: Sequence[FileSpec],
        *,
        pool_bytes: int,
        seed: int,
        crc: bool,
        subset: float | None = None,
        pool: RandomPool | None = None,
    ) -> None:
        """Use at most `pool_bytes` of memory for all tensors, or `pool`, which others share.

        With `crc`, torch's zip files have a CRC32. `subset` has the meaning that it has in `want`.
        """
        self.files = [in_payload_order(spec) for spec in files]
        self._crc, self._seed = crc, seed
        self.longest_bytes, enough = self._needs(self.files)
        self._pool = pool or RandomPool(min(pool_bytes, enough), self.longest_bytes, seed)
        self._restored: list[RestoredFile] = []
        windows = Windows(self._pool)
        self.states: list[dict[str, torch.Tensor]] = [
            {t.name: _tensor(t, windows.take(t.size_bytes)) for t in spec.tensors}
            for spec in self.files
        ]
        """Each file's tensors by name, in payload order; their windows never change."""
        self._digests = Digests(self.states, self._pool)
        self.want(subset)

    @staticmethod
    def pool_for(some: Iterable[Sequence[FileSpec]], *, pool_bytes: int, seed: int) -> RandomPool:
        """Return a pool of at most `pool_bytes`, for replays of all lists in `some`, in turn."""
        needs = [Replay._needs([in_payload_order(spec) for spec in files]) for files in some]
        enough = max(enough for _, enough in needs)
        return RandomPool(min(pool_bytes, enough), max(longest for longest, _ in needs), seed)

    @staticmethod
    def _needs(files: Sequence[FileSpec]) -> tuple[int, int]:
        """Return (bytes of the longest tensor, bytes of a pool that holds all tensors)."""
        sizes = [tensor.size_bytes for spec in files for tensor in spec.tensors]
        return max(sizes, default=0), Windows.needed_bytes(sizes)

    def want(self, subset: float | None) -> None:
        """From now on restore only tensors that make up the part `subset` of the bytes.

        The seed chooses the tensors, so they are the same each time. None restores all of them.
        Saves always write all tensors.
        """
        self.subset = subset
        self.wanted: list[dict[str, torch.Tensor]] = (
            self.states if subset is None else choose(self.states, subset, self._seed)
        )
        """The tensors of `states` that restores read."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Facts about the replay that change how its figures are read."""
        found = []
        if any(spec.format == "dcp" for spec in self.files):
            found.append("DCP files are replayed as raw bytes of the same sizes")
        if self.longest_bytes > self._pool.size_bytes:
            found.append(
                f"a tensor of {self.longest_bytes} bytes repeats the pool's "
                f"{self._pool.size_bytes} random bytes; a larger --pool avoids it"
            )
        return tuple(found)

    @cached_property
    def file_bytes(self) -> tuple[int, ...]:
        """Bytes of each file as our formats write it. No tensor's memory is read."""
        return tuple(
            self._file_size(spec, state)
            for spec, state in zip(self.files, self.states, strict=True)
        )

    def size_bytes(self) -> int:
        """Bytes of all files as our formats write them."""
        return sum(self.file_bytes)

    @property
    def restored_bytes(self) -> tuple[int, ...]:
        """Bytes that a restore moves for each file; for a subset, those of its tensors only."""
        if self.subset is None:
            return self.file_bytes
        return tuple(sum(t.nbytes for t in state.values()) for state in self.wanted)

    def prepare(self) -> None:
        """Make the next checkpoint's bytes, and keep the digest of each tensor."""
        self._pool.renew()
        with self._pool.trimmed():
            self._digests.remember()

    def save(
        self, writer: Writer, directory: str | Path, file_format: FileFormat | None = None
    ) -> list[Transfer]:
        """Write every file below `directory`; each is durable, except for its directory entry.

        With `file_format`, all files are written in that format, under their own names.
        """
        with self._pool.trimmed():
            return [
                self._save_file(spec, state, writer, directory, file_format or spec.format)
                for spec, state in zip(self.files, self.states, strict=True)
            ]

    def scrub(self) -> None:
        """Change all memory that a restore will fill."""
        self._pool.scrub()

    def restore(self, writer: Writer, directory: str | Path) -> list[Transfer]:
        """Read every file back into the windows it was saved from."""
        windows = Windows(self._pool)
        self._restored = []
        self._pool.intact = False
        transfers = []
        with self._pool.trimmed():
            for spec, wanted in zip(self.files, self.wanted, strict=True):
                began = time.perf_counter()
                restored = RestoredFile.open(spec, windows, self.longest_bytes, writer, directory)
                parse_s = time.perf_counter() - began
                self._restored.append(restored)
                if self.subset is None:
                    transfer = writer.read(restored.image, directory)
                else:
                    transfer = read_some(restored.image, wanted.values(), writer, directory)
                phases = {"parse": parse_s, **transfer.phases_s}
                transfers.append(replace(transfer, phases_s=phases))
        return transfers

    def load(
        self, writer: Writer, directory: str | Path
    ) -> tuple[list[Transfer], list[dict[Any, Any]]]:
        """Restore every file into new memory, which takes the size of the checkpoint.

        Calls the formats' own `load`, like a trainer. `verify_states` compares the result.
        """
        transfers, loaded = [], []
        for spec, state, wanted in zip(self.files, self.states, self.wanted, strict=True):
            began = time.perf_counter()
            found: dict[Any, Any]
            if self.subset is not None:
                found, image = self._allocate(spec, state, writer, directory)
                found = dict(flat(found))
                some = [found[name] for name in wanted]
                transfer = read_some(image, some, writer, directory)
            elif spec.format == "safetensors":
                found, transfer = safetensors.load(spec.path, directory, writer)
            elif spec.format == "torch":
                found, transfer = torch_file.load(spec.path, directory, writer)
            else:
                found = {name: torch.empty_like(tensor) for name, tensor in state.items()}
                transfer = raw.load(found.values(), spec.path, directory, writer)
            parse_s = time.perf_counter() - began - transfer.elapsed_s
            transfers.append(replace(transfer, phases_s={"parse": parse_s, **transfer.phases_s}))
            loaded.append(found)
        return transfers, loaded

    @staticmethod
    def _allocate(
        spec: FileSpec, state: Mapping[str, torch.Tensor], writer: Writer, directory: str | Path
    ) -> tuple[dict[Any, Any], FileImage]:
        """Return new, untouched memory for all tensors of a file, and the image that fills it."""
        if spec.format == "safetensors":
            return safetensors.prepare(spec.path, directory, writer)
        if spec.format == "torch":
            return torch_file.prepare(spec.path, directory, writer)
        found = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        return found, raw.image(spec.path, found.values())

    def verify(self, writer: Writer, directory: str | Path) -> Verified:
        """Compare every tensor with what was saved, after `restore`; see `Digests`."""
        restored, self._restored = self._restored, []
        verified = self._digests.compare_files(restored, self.wanted, writer, directory)
        self._pool.intact = not verified.mismatches
        return verified

    def verify_states(self, restored: Sequence[Mapping[Any, Any]]) -> Verified:
        """Compare tensors that were restored to new memory, one mapping per file; see `Digests`."""
        return self._digests.compare_states(restored, self.wanted)

    def _file_size(self, spec: FileSpec, tensors: dict[str, torch.Tensor]) -> int:
        if spec.format == "safetensors":
            return safetensors.image(spec.path, tensors, SAFETENSORS_METADATA).size_bytes
        if spec.format != "torch":
            return raw.image(spec.path, tensors.values()).size_bytes
        # Without CRC32s, which take no other room: they alone would read the tensors.
        image = torch_image.image(spec.path, nested(tensors), crc=False)
        if image is not None:
            return image.size_bytes
        return self._save_file(spec, tensors, make("null"), Path(), spec.format).bytes

    def _save_file(
        self,
        spec: FileSpec,
        tensors: dict[str, torch.Tensor],
        writer: Writer,
        directory: str | Path,
        file_format: FileFormat,
    ) -> Transfer:
        if file_format == "safetensors":
            return safetensors.save(
                tensors,
                spec.path,
                directory,
                writer,
                metadata=SAFETENSORS_METADATA,
                sync_directory=False,
            )
        if file_format == "torch":
            return torch_file.save(
                nested(tensors),
                spec.path,
                directory,
                writer,
                crc=self._crc,
                sync_directory=False,
            )
        return raw.save(tensors.values(), spec.path, directory, writer, sync_directory=False)


def _tensor(spec: TensorSpec, window: Window) -> torch.Tensor:
    return tensor_from_bytes(window.memory, torch_dtype(spec.dtype), spec.shape)
