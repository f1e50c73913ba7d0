"""What benchmarks/offload.py compares the offloaded step with: mmap, and a swap of the state."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.adam import adam

from iobench.units import MIB

_CHUNK = 4 * MIB
_KINDS = 3  # master weights and two moments
_QUEUE_DEPTH = 8


def update(tensors: list[torch.Tensor], parameter: torch.Tensor, start: int, stop: int) -> None:
    """One AdamW update of elements of `parameter`, with the same kernel as iobench.offload."""
    assert parameter.grad is not None
    with torch.no_grad():
        adam(
            [tensors[0]],
            [parameter.grad[start:stop].float()],
            [tensors[1]],
            [tensors[2]],
            [],
            [torch.tensor(1.0)],
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=1e-3,
            weight_decay=0.01,
            eps=1e-8,
            maximize=False,
            decoupled_weight_decay=True,
        )
        parameter[start:stop] = tensors[0]


class MappedState:
    """State in memory-mapped files, whose pages are dropped before each step."""

    def __init__(self, directory: Path, elements: int) -> None:
        self._files = [directory / f"mapped-{number}" for number in range(_KINDS)]
        self._elements = elements
        for one in self._files:
            with one.open("wb") as opened:
                os.posix_fallocate(opened.fileno(), 0, elements * 4)

    def step(self, model: list[torch.nn.Parameter]) -> float:
        """Seconds of one step until msync has returned."""
        for file in self._files:
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        maps, tensors = [], []
        for file in self._files:
            with file.open("r+b") as opened:
                maps.append(mmap.mmap(opened.fileno(), self._elements * 4))
            tensors.append(torch.from_numpy(np.frombuffer(maps[-1], dtype=np.float32)))
        base = 0
        for parameter in model:
            for start in range(0, len(parameter), _CHUNK):
                stop = min(start + _CHUNK, len(parameter))
                own = [tensor[base + start : base + stop] for tensor in tensors]
                update(own, parameter, start, stop)
            base += len(parameter)
        for one in maps:
            one.flush()
        elapsed_s = time.perf_counter() - began
        del tensors, own
        return elapsed_s


class SwappedState:
    """State that DeepSpeed's asynchronous I/O operator swaps in and out, as its NVMe offload does.

    One file for each tensor of each sub-group of `_CHUNK` elements, updated in place: it reads the
    next sub-group and writes the last one while one is updated, each with a handle of its own
    (`pipeline_read` and `pipeline_write`), in pinned buffers. Raises when it cannot be loaded.
    """

    def __init__(self, directory: Path, model: list[torch.nn.Parameter]) -> None:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        operator = AsyncIOBuilder().load()
        self._read, self._write = (
            operator.aio_handle(
                block_size=MIB,
                queue_depth=_QUEUE_DEPTH,
                single_submit=False,
                overlap_events=True,
                intra_op_parallelism=1,
            )
            for _ in range(2)
        )
        self._parts = [
            (parameter, start, min(start + _CHUNK, len(parameter)))
            for parameter in model
            for start in range(0, len(parameter), _CHUNK)
        ]
        like = torch.empty(0, dtype=torch.float32)
        self._buffers: list[list[Any]] = [
            [self._read.new_cpu_locked_tensor(_CHUNK, like) for _ in range(_KINDS)]
            for _ in range(3)
        ]
        self._directory = directory
        for number in range(len(self._parts)):
            self._start(self._write, number, writes=True)
            self._write.wait()

    def _start(self, handle: Any, number: int, *, writes: bool) -> None:
        _, start, stop = self._parts[number]
        size = -(-(stop - start) // 1024) * 1024  # whole blocks
        for kind, buffer in enumerate(self._buffers[number % 3]):
            path = str(self._directory / f"swap-{number}-{kind}")
            call = handle.async_pwrite if writes else handle.async_pread
            if call(buffer[:size], path, 0) != 0:
                raise OSError(f"{path}: refused")

    def step(self) -> float:
        """Seconds of one step until its writes and the fsync of each file have returned."""
        began = time.perf_counter()
        self._start(self._read, 0, writes=False)
        writing = False
        for number, (parameter, start, stop) in enumerate(self._parts):
            self._read.wait()
            if number + 1 < len(self._parts):
                self._start(self._read, number + 1, writes=False)
            tensors = [buffer[: stop - start] for buffer in self._buffers[number % 3]]
            update(tensors, parameter, start, stop)
            if writing:
                self._write.wait()
            self._start(self._write, number, writes=True)
            writing = True
        self._write.wait()
        for path in self._directory.glob("swap-*"):
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
        return time.perf_counter() - began
