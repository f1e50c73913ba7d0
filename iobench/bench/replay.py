"""Replay: a workload's files bound to windows of the pool; saved, restored and verified."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from iobench.bench.pool import RandomPool, Window, Windows
from iobench.errors import DataMismatchError
from iobench.formats import raw, safetensors, torch_file
from iobench.formats.safetensors_header import header_bytes
from iobench.formats.tensors import tensor_from_bytes, torch_dtype
from iobench.results.records import Verified
from iobench.units import MIB
from iobench.workloads.specs import SAFETENSORS_METADATA, FileSpec, TensorSpec
from iobench.writers.base import Writer
from iobench.writers.image import Bytes, FileImage
from iobench.writers.registry import make
from iobench.writers.transfer import Transfer

__all__ = ["Replay"]

_DIGEST_STEP, _READ_AGAIN_STEP = 16 * MIB, 64 * MIB  # a long tensor need not be resident whole


@dataclass(frozen=True, kw_only=True)
class _Payload:
    """One tensor's bytes: where they stand in the file, and where in the pool."""

    offset: int
    window: Window


@dataclass(frozen=True, kw_only=True)
class _Restored:
    """A file that was read back: its image, and its payload in file order."""

    image: FileImage
    payload: tuple[_Payload, ...]


class Replay:
    """The files of one rank, over and over, each time with other bytes.

    `prepare` makes the bytes of the next checkpoint; `save` and `restore` move them through a
    writer and are what gets timed; `verify` compares what came back, tensor by tensor.
    """

    def __init__(self, files: Sequence[FileSpec], *, pool_bytes: int, seed: int, crc: bool) -> None:
        """At most `pool_bytes` of memory stand in for all tensors.

        `crc` says whether torch's zip files get their CRC32.
        """
        self.files = [_in_payload_order(spec) for spec in files]
        self._crc = crc
        tensors = [tensor for spec in self.files for tensor in spec.tensors]
        self.longest_bytes = max((tensor.size_bytes for tensor in tensors), default=0)
        enough = Windows.needed_bytes(tensor.size_bytes for tensor in tensors)
        self._pool = RandomPool(min(pool_bytes, enough), self.longest_bytes, seed)
        self._expected: list[list[int]] = []
        self._restored: list[_Restored] = []

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the figures should know of how the files are replayed."""
        found = []
        if self._crc and any(spec.format == "torch" for spec in self.files):
            found.append("torch.save computes the zip's CRC32 on one core; --no-crc leaves it out")
        if any(spec.format == "dcp" for spec in self.files):
            found.append("DCP files are replayed as raw bytes of the same sizes")
        if self.longest_bytes > self._pool.size_bytes:
            found.append(
                f"a tensor of {self.longest_bytes} bytes repeats the pool's "
                f"{self._pool.size_bytes} random bytes; a larger --pool avoids it"
            )
        return tuple(found)

    def size_bytes(self) -> int:
        """Bytes of all files as they will be written, found by writing them to nowhere."""
        return sum(transfer.bytes for transfer in self.save(make("null"), Path()))

    def prepare(self) -> None:
        """Make the next checkpoint's bytes, and remember what each tensor holds."""
        self._pool.refill()
        windows = Windows(self._pool)
        with self._pool.trimmed():
            self._expected = [
                [self._digest([windows.take(tensor.size_bytes).memory]) for tensor in spec.tensors]
                for spec in self.files
            ]

    def save(self, writer: Writer, directory: str | Path) -> list[Transfer]:
        """Write every file below `directory`, each durable but for its directory's entry."""
        windows = Windows(self._pool)
        with self._pool.trimmed():
            return [self._save_file(spec, windows, writer, directory) for spec in self.files]

    def scrub(self) -> None:
        """Change all memory that a restore will fill."""
        self._pool.scrub()

    def restore(self, writer: Writer, directory: str | Path) -> list[Transfer]:
        """Read every file back into the windows it was saved from."""
        windows = Windows(self._pool)
        self._restored = []
        transfers = []
        with self._pool.trimmed():
            for spec in self.files:
                restored = self._open(spec, windows, writer, directory)
                self._restored.append(restored)
                transfers.append(writer.read(restored.image, directory))
        return transfers

    def verify(self, writer: Writer, directory: str | Path) -> Verified:
        """Compare every tensor with what was saved, after `restore`.

        What the restore left in memory is compared as it is. Where the pool is smaller than the
        checkpoint, later tensors have taken the place of earlier ones: those are read once more.
        """
        pairs = [
            (restored.image, payload, digest)
            for restored, digests in zip(self._restored, self._expected, strict=True)
            for payload, digest in zip(restored.payload, digests, strict=True)
        ]
        last_lap = max((payload.window.lap for _, payload, _ in pairs), default=0)
        wrong, gone = 0, []
        for image, payload, digest in pairs:
            memory = payload.window.memory
            if payload.window.lap == last_lap and len(memory) <= self._pool.size_bytes:
                wrong += self._digest([memory]) != digest
            else:
                gone.append((image, payload, digest))
        with self._pool.trimmed():
            for image, payload, digest in gone:
                wrong += self._digest(self._read_again(image, payload, writer, directory)) != digest
        return Verified(
            tensors=len(pairs),
            bytes=sum(len(payload.window.memory) for _, payload, _ in pairs),
            mismatches=wrong,
        )

    def _read_again(
        self, image: FileImage, payload: _Payload, writer: Writer, directory: str | Path
    ) -> Iterator[Bytes]:
        """One tensor's bytes in parts that the pool can hold, each read just before."""
        memory = payload.window.memory
        step = min(self._pool.size_bytes, _READ_AGAIN_STEP)
        for begin in range(0, len(memory), step):
            end = min(begin + step, len(memory))
            offset = payload.offset
            # The right bytes may stand there, from another window of the same part of the pool.
            np.invert(memory[begin:end], out=memory[begin:end])
            writer.read(image, directory, start=offset + begin, stop=offset + end)
            yield memory[begin:end]

    def _digest(self, parts: Iterable[Bytes]) -> int:
        """XXH3 of the parts one after another: not cryptographic, at the speed of memory."""
        state = xxhash.xxh3_64()
        for part in parts:
            for start in range(0, len(part), _DIGEST_STEP):
                state.update(part[start : start + _DIGEST_STEP].data)
                self._pool.trim()
        return state.intdigest()

    def _save_file(
        self, spec: FileSpec, windows: Windows, writer: Writer, directory: str | Path
    ) -> Transfer:
        tensors = {t.name: _tensor(t, windows.take(t.size_bytes)) for t in spec.tensors}
        if spec.format == "safetensors":
            return safetensors.save(
                tensors,
                spec.path,
                directory,
                writer,
                metadata=SAFETENSORS_METADATA,
                sync_directory=False,
            )
        if spec.format == "torch":
            return torch_file.save(
                _nested(tensors),
                spec.path,
                directory,
                writer,
                crc=self._crc,
                size_hint=spec.size_bytes,
            )
        return raw.save(tensors.values(), spec.path, directory, writer, sync_directory=False)

    def _open(
        self, spec: FileSpec, windows: Windows, writer: Writer, directory: str | Path
    ) -> _Restored:
        taken: list[Window] = []

        other = DataMismatchError(f"{spec.path}: holds other tensors than were saved")

        def allocate(size_bytes: int) -> Bytes:
            if size_bytes > self.longest_bytes:
                raise other
            window = windows.take(size_bytes)
            if size_bytes:  # for empty tensors not every format asks
                taken.append(window)
            return window.memory

        if spec.format == "safetensors":
            _, image = safetensors.prepare(spec.path, directory, writer, allocate=allocate)
        elif spec.format == "torch":
            _, image = torch_file.prepare(spec.path, directory, writer, allocate=allocate)
        else:
            image = FileImage.of(spec.path, [allocate(t.size_bytes) for t in spec.tensors])
        sizes = [tensor.size_bytes for tensor in spec.tensors]
        if [len(window.memory) for window in taken] != [size for size in sizes if size]:
            raise other
        offsets = {id(segment.memory): segment.offset for segment in image.segments}
        in_order = iter(taken)
        payload = []
        for size in sizes:
            window = next(in_order) if size else windows.take(0)
            payload.append(_Payload(offset=offsets.get(id(window.memory), 0), window=window))
        return _Restored(image=image, payload=tuple(payload))


def _tensor(spec: TensorSpec, window: Window) -> torch.Tensor:
    return tensor_from_bytes(window.memory, torch_dtype(spec.dtype), spec.shape)


def _nested(tensors: dict[str, torch.Tensor]) -> dict[Any, Any]:
    """`state/0/exp_avg` as nested dicts, digits being int keys."""
    root: dict[Any, Any] = {}
    for name, tensor in tensors.items():
        *parents, leaf = (int(p) if p.isdigit() else p for p in name.split("/"))
        inner = root
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[leaf] = tensor
    return root


def _in_payload_order(spec: FileSpec) -> FileSpec:
    """`spec` with its tensors in the order in which their bytes stand in the file.

    A DCP file gets one more "tensor" for the archives' headers that are not tensors.
    """
    tensors = list(spec.tensors)
    if spec.format == "safetensors":
        by_name = {t.name: t for t in tensors}
        _, places = header_bytes([(t.name, t.dtype, t.shape) for t in tensors])
        tensors = [by_name[name] for name in places]
    elif spec.format == "torch":
        by_name = {t.name: t for t in tensors}
        tensors = [by_name[name] for name in _walk(_nested({n: n for n in by_name}))]  # type: ignore[misc]
    elif spec.size_bytes > spec.payload_bytes:
        rest = spec.size_bytes - spec.payload_bytes
        tensors.append(TensorSpec(name="archive headers", dtype="uint8", shape=(rest,)))
    return FileSpec(
        path=spec.path,
        format=spec.format,
        tensors=tuple(tensors),
        size_bytes=spec.size_bytes,
        exact=spec.exact,
    )


def _walk(nested: dict[Any, Any]) -> Iterator[str]:
    for value in nested.values():
        if isinstance(value, dict):
            yield from _walk(value)
        else:
            yield value
