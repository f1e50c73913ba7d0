"""Replay: a workload's files bound to windows of the pool; saved, restored and verified."""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from iobench.bench.pool import RandomPool, Window, Windows
from iobench.errors import DataMismatchError
from iobench.formats import raw, safetensors, torch_file
from iobench.formats.safetensors_header import header_bytes
from iobench.formats.tensors import tensor_bytes, tensor_from_bytes, torch_dtype
from iobench.results.records import Verified
from iobench.units import MIB
from iobench.workloads.specs import SAFETENSORS_METADATA, FileFormat, FileSpec, TensorSpec
from iobench.writers.base import Writer
from iobench.writers.image import Bytes, FileImage, Segment
from iobench.writers.registry import make
from iobench.writers.transfer import Meter, Transfer

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

    def __init__(
        self,
        files: Sequence[FileSpec],
        *,
        pool_bytes: int,
        seed: int,
        crc: bool,
        subset: float | None = None,
    ) -> None:
        """At most `pool_bytes` of memory stand in for all tensors.

        `crc` says whether torch's zip files get their CRC32. With `subset` restores bring only
        tensors that make up that part of the bytes, chosen by `seed`; all are saved.
        """
        self.files = [_in_payload_order(spec) for spec in files]
        self._crc = crc
        tensors = [tensor for spec in self.files for tensor in spec.tensors]
        self.longest_bytes = max((tensor.size_bytes for tensor in tensors), default=0)
        enough = Windows.needed_bytes(tensor.size_bytes for tensor in tensors)
        self._pool = RandomPool(min(pool_bytes, enough), self.longest_bytes, seed)
        self._expected: list[list[int]] = []
        self._restored: list[_Restored] = []
        windows = Windows(self._pool)
        self.states: list[dict[str, torch.Tensor]] = [
            {t.name: _tensor(t, windows.take(t.size_bytes)) for t in spec.tensors}
            for spec in self.files
        ]
        """Each file's tensors by name, in payload order: the same windows of the pool each time."""
        self.subset = subset
        self.wanted: list[dict[str, torch.Tensor]] = (
            self.states if subset is None else _choose(self.states, subset, seed)
        )
        """Of `states`, what restores bring."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the figures should know of how the files are replayed."""
        found = []
        if any(spec.format == "dcp" for spec in self.files):
            found.append("DCP files are replayed as raw bytes of the same sizes")
        if self.longest_bytes > self._pool.size_bytes:
            found.append(
                f"a tensor of {self.longest_bytes} bytes repeats the pool's "
                f"{self._pool.size_bytes} random bytes; a larger --pool avoids it"
            )
        if self.subset is not None:
            found.append(f"restores bring {100 * self.subset:.3g} % of the bytes, whole tensors")
        return tuple(found)

    @cached_property
    def file_bytes(self) -> tuple[int, ...]:
        """Bytes of each file as our formats write it, found by writing it to nowhere."""
        return tuple(transfer.bytes for transfer in self.save(make("null"), Path()))

    def size_bytes(self) -> int:
        """Bytes of all files as our formats write them."""
        return sum(self.file_bytes)

    @property
    def restored_bytes(self) -> tuple[int, ...]:
        """Bytes that a restore moves for each file: of a subset the tensors' alone."""
        if self.subset is None:
            return self.file_bytes
        return tuple(sum(t.nbytes for t in state.values()) for state in self.wanted)

    def prepare(self) -> None:
        """Make the next checkpoint's bytes, and remember what each tensor holds."""
        self._pool.refill()
        with self._pool.trimmed():
            self._expected = [
                [self._digest([tensor_bytes(tensor)]) for tensor in state.values()]
                for state in self.states
            ]

    def save(
        self, writer: Writer, directory: str | Path, file_format: FileFormat | None = None
    ) -> list[Transfer]:
        """Write every file below `directory`, each durable but for its directory's entry.

        `file_format` writes all files in that format, under the names they have.
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
        transfers = []
        with self._pool.trimmed():
            for spec, wanted in zip(self.files, self.wanted, strict=True):
                began = time.perf_counter()
                restored = self._open(spec, windows, writer, directory)
                parse_s = time.perf_counter() - began
                self._restored.append(restored)
                if self.subset is None:
                    transfer = writer.read(restored.image, directory)
                else:
                    transfer = _read_some(restored.image, wanted.values(), writer, directory)
                phases = {"parse": parse_s, **transfer.phases_s}
                transfers.append(replace(transfer, phases_s=phases))
        return transfers

    def load(
        self, writer: Writer, directory: str | Path
    ) -> tuple[list[Transfer], list[dict[Any, Any]]]:
        """Restore every file into new memory, as much as the checkpoint is large.

        By the formats' own `load`, as a trainer calls it; `verify_states` compares what it gives.
        """
        transfers, loaded = [], []
        for spec, state, wanted in zip(self.files, self.states, self.wanted, strict=True):
            began = time.perf_counter()
            found: dict[Any, Any]
            if self.subset is not None:
                found, image = self._allocate(spec, state, writer, directory)
                found = dict(_flat(found))
                some = [found[name] for name in wanted]
                transfer = _read_some(image, some, writer, directory)
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
        """New memory for all tensors of a file, and the image that fills it; untouched as yet."""
        if spec.format == "safetensors":
            return safetensors.prepare(spec.path, directory, writer)
        if spec.format == "torch":
            return torch_file.prepare(spec.path, directory, writer)
        found = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        return found, raw.image(spec.path, found.values())

    def verify(self, writer: Writer, directory: str | Path) -> Verified:
        """Compare every tensor with what was saved, after `restore`.

        What the restore left in memory is compared as it is. Where the pool is smaller than the
        checkpoint, later tensors have taken the place of earlier ones: those are read once more.
        """
        pairs = [
            (restored.image, payload, digest)
            for restored, state, wanted, digests in zip(
                self._restored, self.states, self.wanted, self._expected, strict=True
            )
            for name, payload, digest in zip(state, restored.payload, digests, strict=True)
            if name in wanted
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
        self._restored = []
        return Verified(
            tensors=len(pairs),
            bytes=sum(len(payload.window.memory) for _, payload, _ in pairs),
            mismatches=wrong,
        )

    def verify_states(self, restored: Sequence[Mapping[Any, Any]]) -> Verified:
        """Compare tensors that came back in new memory, one mapping (perhaps nested) per file.

        A tensor that is missing or has another dtype or shape counts as one that differs.
        """
        tensors = size = wrong = 0
        for nested, state, wanted, digests in zip(
            restored, self.states, self.wanted, self._expected, strict=True
        ):
            found = dict(_flat(nested))
            for (name, saved), digest in zip(state.items(), digests, strict=True):
                if name not in wanted:
                    continue
                tensors, size = tensors + 1, size + saved.nbytes
                tensor = found.get(name)
                same = (
                    tensor is not None
                    and (tensor.dtype, tensor.shape) == (saved.dtype, saved.shape)
                    and self._digest([tensor_bytes(tensor)]) == digest
                )
                wrong += not same
        return Verified(tensors=tensors, bytes=size, mismatches=wrong)

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
                _nested(tensors),
                spec.path,
                directory,
                writer,
                crc=self._crc,
                sync_directory=False,
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


def _choose(
    states: Sequence[dict[str, torch.Tensor]], part: float, seed: int
) -> list[dict[str, torch.Tensor]]:
    """Tensors at random until they have `part` of all bytes; at least one that has any."""
    keys = [(i, name) for i, state in enumerate(states) for name in state]
    least = part * sum(tensor.nbytes for state in states for tensor in state.values())
    chosen: set[tuple[int, str]] = set()
    size = 0
    for position in np.random.default_rng(seed).permutation(len(keys)):
        if size and size >= least:
            break
        i, name = keys[position]
        chosen.add((i, name))
        size += states[i][name].nbytes
    return [
        {name: tensor for name, tensor in state.items() if (i, name) in chosen}
        for i, state in enumerate(states)
    ]


def _read_some(
    image: FileImage, tensors: Iterable[torch.Tensor], writer: Writer, directory: str | Path
) -> Transfer:
    """Fill only `tensors`, which are parts of the image's memory; neighbours by one read."""
    placed = [(_address(segment.memory), segment) for segment in image.segments]
    starts = sorted(placed, key=lambda entry: entry[0])
    ranges: list[tuple[int, int]] = []
    for start, stop in sorted(_place(tensor, starts) for tensor in tensors if tensor.nbytes):
        if ranges and ranges[-1][1] == start:
            start = ranges.pop()[0]
        ranges.append((start, stop))
    meter = Meter()
    parts = [writer.read(image, directory, start=start, stop=stop) for start, stop in ranges]
    return Transfer.total(parts) if parts else meter.transfer(writer.name, "read", 0, durable=True)


def _place(tensor: torch.Tensor, starts: Sequence[tuple[int, Segment]]) -> tuple[int, int]:
    """[start, stop) of the tensor's bytes in the file."""
    index = bisect.bisect_right(starts, tensor.data_ptr(), key=lambda entry: entry[0]) - 1
    address, segment = starts[index]
    start = segment.offset + tensor.data_ptr() - address
    return start, start + tensor.nbytes


def _address(memory: Any) -> int:
    return int(np.asarray(memory).ctypes.data)


def _flat(nested: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of nested dicts under the names that `_nested` took apart."""
    for key, value in nested.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


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
