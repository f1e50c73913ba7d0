"""Digests of every tensor of a replay, to compare restored tensors with saved ones."""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import ne
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from iobench.bench.data.pool import RandomPool
from iobench.bench.data.states import States, WindowPlacement, flat
from iobench.errors import DataMismatchError
from iobench.formats import safetensors, torch_file
from iobench.formats.tensors import tensor_bytes
from iobench.results.records import Verified
from iobench.units import MIB
from iobench.workloads.specs import FileFormat
from iobench.writers.base import Writer
from iobench.writers.blocks.workers import map_in_workers
from iobench.writers.image import Bytes, FileImage

_READ_AGAIN_STEP = 64 * MIB  # so that a long tensor is never resident as a whole


@dataclass(frozen=True, kw_only=True)
class RestoredFile:
    """A file's image, which a read fills, and the memory of its tensors in payload order."""

    image: FileImage
    payload: Sequence[Bytes]
    writer: Writer
    directory: str | Path

    @classmethod
    def open(
        cls,
        path: str,
        file_format: FileFormat,
        payload: Sequence[Bytes],
        writer: Writer,
        directory: str | Path,
    ) -> RestoredFile:
        """Read the file's header, and place its tensors in the memory `payload`.

        Raises DataMismatchError for a file of tensors of other sizes.
        """
        filled = iter([memory for memory in payload if len(memory)])
        other = DataMismatchError(f"{path}: holds other tensors than were saved")

        def allocate(size_bytes: int) -> Bytes:
            if not size_bytes:  # some formats do not call this for empty tensors
                return np.empty(0, np.uint8)
            memory = next(filled, None)
            if memory is None or len(memory) != size_bytes:
                raise other
            return memory

        if file_format == "safetensors":
            _, image = safetensors.prepare(path, directory, writer, allocate=allocate)
        elif file_format == "torch":
            _, image = torch_file.prepare(path, directory, writer, allocate=allocate)
        else:
            image = FileImage.of(path, [allocate(len(memory)) for memory in payload])
        if next(filled, None) is not None:
            raise other
        return cls(image=image, payload=payload, writer=writer, directory=directory)

    @cached_property
    def _offsets(self) -> dict[int, int]:
        return {id(segment.memory): segment.offset for segment in self.image.segments}

    def read_again(self, tensor: int, step_bytes: int) -> Iterator[Bytes]:
        """Yield one tensor's bytes in parts of at most `step_bytes`; read each just before."""
        memory = self.payload[tensor]
        offset = self._offsets.get(id(memory), 0)
        step = min(step_bytes, _READ_AGAIN_STEP)
        for begin in range(0, len(memory), step):
            end = min(begin + step, len(memory))
            # The memory may hold the right bytes already, from another window of the same part of
            # the pool. Inverted bytes are wrong unless the read replaces them.
            np.invert(memory[begin:end], out=memory[begin:end])
            self.writer.read(self.image, self.directory, start=offset + begin, stop=offset + end)
            yield memory[begin:end]


_PART = 32 * MIB  # of small tensors, in one thread
_STEP = 16 * MIB  # so that a long tensor is never resident as a whole


class Digests:
    """One XXH3 digest per tensor and file; not cryptographic, about as fast as memory."""

    def __init__(self, placement: WindowPlacement, pool: RandomPool) -> None:
        self._placement, self._pool = placement, pool
        self._expected = array("Q")
        self._of_cuts: dict[str, array[int]] = {}

    def remember(self, cuts: Mapping[str, States] | None = None) -> None:
        """Keep the digests of the tensors' present bytes; restores must return the same bytes.

        `cuts` are states of slices, by names that `compare_states` gets.
        """
        self._expected = self._in_memory(range(self._placement.count))
        self._of_cuts = {name: self._of_slices(states) for name, states in (cuts or {}).items()}

    def _of_slices(self, states: States) -> array[int]:
        found = array("Q", bytes(8 * self._placement.count))
        for file in range(len(states)):
            for number, part in zip(states.numbers(file), states[file].values(), strict=True):
                found[number] = self._digest([tensor_bytes(part)])
        return found

    def to_text(self) -> str:
        """Return the digests for another process, which restores these tensors."""
        every = {"": self._expected, **self._of_cuts}
        return json.dumps({k: base64.b64encode(v.tobytes()).decode() for k, v in every.items()})

    def expect(self, text: str) -> None:
        """Take the digests of `to_text` in place of own ones."""
        every = {k: array("Q", base64.b64decode(v)) for k, v in json.loads(text).items()}
        for found in every.values():
            if len(found) != self._placement.count:
                raise ValueError(f"digests of {len(found)} tensors for {self._placement.count}")
        self._expected = every.pop("")
        self._of_cuts = every

    def compare_files(self, reopen: Callable[[int], RestoredFile]) -> Verified:
        """Compare the tensors that were read into the pool.

        Tensors that are still in memory are compared there. Where the pool is smaller than the
        checkpoint, later tensors have overwritten earlier ones, which are read once more: `reopen`
        returns a file by its number.
        """
        placement, pool_bytes = self._placement, self._pool.size_bytes
        size = last_lap = 0
        for number in range(placement.count):
            start, stop, lap = placement.window(number)
            size, last_lap = size + stop - start, max(last_lap, lap)

        def is_here(number: int) -> bool:
            start, stop, lap = placement.window(number)
            return start == stop or (lap == last_lap and stop - start <= pool_bytes)

        here = array("Q", filter(is_here, range(placement.count)))
        wrong = sum(map(ne, self._in_memory(here), (self._expected[n] for n in here)))
        with self._pool.trimmed():
            for file in range(len(placement.files)):
                gone = [number for number in placement.tensors(file) if not is_here(number)]
                opened = reopen(file) if gone else None
                for number in gone:
                    assert opened is not None
                    first = placement.tensors(file).start
                    parts = opened.read_again(number - first, pool_bytes)
                    wrong += self._digest(parts) != self._expected[number]
        return Verified(tensors=placement.count, bytes=size, mismatches=wrong)

    def compare_states(
        self, found: Sequence[Mapping[Any, Any]], wanted: States, cut: str | None = None
    ) -> Verified:
        """Compare tensors that were restored to new memory, one mapping per file.

        A mapping may be nested. A tensor that is missing, or that has another dtype or shape,
        counts as a mismatch. `cut` is the name of the slices in `wanted`.
        """
        expected = self._expected if cut is None else self._of_cuts[cut]
        tensors = size = wrong = 0
        for file, (nested, some) in enumerate(zip(found, wanted, strict=True)):
            named = dict(flat(nested))
            for number, (name, saved) in zip(wanted.numbers(file), some.items(), strict=True):
                tensors, size = tensors + 1, size + saved.nbytes
                tensor = named.get(name)
                same = (
                    tensor is not None
                    and (tensor.dtype, tensor.shape) == (saved.dtype, saved.shape)
                    and self._digest([tensor_bytes(tensor)]) == expected[number]
                )
                wrong += not same
        return Verified(tensors=tensors, bytes=size, mismatches=wrong)

    def _in_memory(self, numbers: Sequence[int]) -> array[int]:
        """Return the digests of the present bytes of these tensors, computed in two threads."""

        def digests(part: Sequence[int]) -> array[int]:
            return array("Q", (self._digest([self._memory(number)]) for number in part))

        found = array("Q")
        for part in map_in_workers(2, digests, list(self._parts(numbers)), caller_waits=True):
            found += part
        return found

    def _parts(self, numbers: Sequence[int]) -> Iterator[Sequence[int]]:
        """Yield consecutive `numbers` of `_PART` bytes or a little more."""
        first = size = 0
        for at, number in enumerate(numbers):
            size += self._placement.size(number)
            if size >= _PART:
                yield numbers[first : at + 1]
                first, size = at + 1, 0
        if first < len(numbers):
            yield numbers[first:]

    def _memory(self, number: int) -> Bytes:
        start, stop, _ = self._placement.window(number)
        return self._pool.memory[start:stop]

    def _digest(self, parts: Iterable[Bytes]) -> int:
        state = xxhash.xxh3_64()
        for part in parts:
            for start in range(0, len(part), _STEP):
                state.update(part[start : start + _STEP].data)
                self._pool.trim()
        return state.intdigest()
