"""Digests of every tensor of a replay, to compare restored tensors with saved ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from iobench.bench.data.nested import flat
from iobench.bench.data.pool import RandomPool
from iobench.bench.data.restored import RestoredFile
from iobench.formats.tensors import tensor_bytes
from iobench.results.records import Verified
from iobench.units import MIB
from iobench.writers.base import Writer
from iobench.writers.image import Bytes

__all__ = ["Digests"]

_STEP = 16 * MIB  # so that a long tensor is never resident as a whole

_States = Sequence[Mapping[str, torch.Tensor]]


class Digests:
    """One XXH3 digest per tensor and file; not cryptographic, about as fast as memory."""

    def __init__(self, states: _States, pool: RandomPool) -> None:
        self._states, self._pool = states, pool
        self._expected: list[list[int]] = []

    def remember(self) -> None:
        """Keep the digests of the tensors' present bytes; restores must return the same bytes."""
        self._expected = [
            [self._digest([tensor_bytes(tensor)]) for tensor in state.values()]
            for state in self._states
        ]

    def compare_files(
        self,
        files: Sequence[RestoredFile],
        wanted: _States,
        writer: Writer,
        directory: str | Path,
    ) -> Verified:
        """Compare the tensors of `wanted` that were read into the pool.

        Tensors that are still in memory are compared there. Where the pool is smaller than the
        checkpoint, later tensors have overwritten earlier ones, which are read once more.
        """
        pairs = [
            (file, payload, digest)
            for file, state, some, digests in zip(
                files, self._states, wanted, self._expected, strict=True
            )
            for name, payload, digest in zip(state, file.payload, digests, strict=True)
            if name in some
        ]
        last_lap = max((payload.window.lap for _, payload, _ in pairs), default=0)
        wrong, gone = 0, []
        for file, payload, digest in pairs:
            memory = payload.window.memory
            if payload.window.lap == last_lap and len(memory) <= self._pool.size_bytes:
                wrong += self._digest([memory]) != digest
            else:
                gone.append((file, payload, digest))
        with self._pool.trimmed():
            for file, payload, digest in gone:
                parts = file.read_again(payload, self._pool.size_bytes, writer, directory)
                wrong += self._digest(parts) != digest
        return Verified(
            tensors=len(pairs),
            bytes=sum(len(payload.window.memory) for _, payload, _ in pairs),
            mismatches=wrong,
        )

    def compare_states(self, found: Sequence[Mapping[Any, Any]], wanted: _States) -> Verified:
        """Compare tensors that were restored to new memory, one mapping per file.

        A mapping may be nested. A tensor that is missing, or that has another dtype or shape,
        counts as a mismatch.
        """
        tensors = size = wrong = 0
        for nested, state, some, digests in zip(
            found, self._states, wanted, self._expected, strict=True
        ):
            named = dict(flat(nested))
            for (name, saved), digest in zip(state.items(), digests, strict=True):
                if name not in some:
                    continue
                tensors, size = tensors + 1, size + saved.nbytes
                tensor = named.get(name)
                same = (
                    tensor is not None
                    and (tensor.dtype, tensor.shape) == (saved.dtype, saved.shape)
                    and self._digest([tensor_bytes(tensor)]) == digest
                )
                wrong += not same
        return Verified(tensors=tensors, bytes=size, mismatches=wrong)

    def _digest(self, parts: Iterable[Bytes]) -> int:
        state = xxhash.xxh3_64()
        for part in parts:
            for start in range(0, len(part), _STEP):
                state.update(part[start : start + _STEP].data)
                self._pool.trim()
        return state.intdigest()
