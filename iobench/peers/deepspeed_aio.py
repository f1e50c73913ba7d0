"""peer:deepspeed-aio: DeepSpeed's asynchronous I/O handle (libaio, O_DIRECT, pinned memory).

The handle transfers whole pinned buffers to offsets of a file; it does not handle tensors. So the
tensors of a state go through two pinned buffers in turn: one is filled while the other is written.
DeepSpeed's own FastFileWriter uses the same double buffering.
"""

from __future__ import annotations

import json
import logging
import os
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iobench.peers.base import Peer, State
from iobench.units import MIB
from iobench.writers.base import Availability
from iobench.writers.options import WriterOptions, option

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("iobench")
_DATA, _INDEX = "data", "index.json"  # the two files in the directory of one state
_BUILD_S, _LOAD_S = 1200.0, 60.0  # one of its files was compiled for 400 s on a busy machine
_POLL_S = 0.2

_Parts = list[tuple["torch.Tensor", "torch.Tensor"]]
"""Parts of tensors, and their places in a block."""


@dataclass(frozen=True, kw_only=True)
class DeepspeedAioOptions(WriterOptions):
    """Options of `deepspeed-aio`; the first four are those of `aio_handle`."""

    block_size: int = option(8 * MIB, unit="bytes", help="Bytes per request.", low=4096)
    queue_depth: int = option(32, help="Requests in flight.", low=1, high=1024)
    intra_op_parallelism: int = option(2, help="Threads that submit.", low=1, high=64)
    single_submit: bool = option(False, help="Submit requests one by one.")
    buffer: int = option(
        64 * MIB, unit="bytes", help="Each of two pinned buffers.", low=MIB, multiple_of=MIB
    )


class DeepspeedAio(Peer):
    """O_DIRECT by libaio. DeepSpeed does not sync its files, so the bench does.

    Each state is a file of raw bytes and an index.
    """

    name = "deepspeed-aio"
    summary = "DeepSpeed's aio_handle: libaio, O_DIRECT, two pinned buffers, with fsync"
    packages = "deepspeed ninja, and apt-get install libaio-dev"
    Options = DeepspeedAioOptions
    options: DeepspeedAioOptions

    def available(self, target: str) -> Availability:  # noqa: ARG002
        """Build the async_io operator if it is not built yet, which takes minutes."""
        try:
            self._engine  # noqa: B018 -- made now, not when the clock runs
        except Exception as error:  # noqa: BLE001 -- a failing build raises errors of any type
            return self._missing(
                f"its async_io operator cannot be built ({type(error).__name__}: {error})."
            )
        return Availability(ok=True)

    def glance(self) -> Availability:
        """Whether DeepSpeed is installed; the reason says if the operator is not built yet."""
        if find_spec("deepspeed") is None:
            return self._missing("No module named 'deepspeed'.")
        if is_built():
            return Availability(ok=True)
        reason = "Its async_io operator is built on first use, which takes minutes."
        return Availability(ok=True, reason=reason)

    def save(self, state: State, path: str) -> None:
        os.mkdir(path)
        handle, buffers = self._engine
        data = [_bytes(tensor) for tensor in state.values()]
        starts = [*accumulate(map(len, data), initial=0)]
        file, size, block = os.path.join(path, _DATA), starts.pop(), len(buffers[0])
        for turn, start in enumerate(range(0, size, block)):
            buffer, length = buffers[turn % 2], min(block, size - start)
            for part, there in _overlaps(starts, data, start, buffer[:length]):
                there.copy_(part)
            if turn:
                handle.wait()
            padded = -(-length // handle.get_alignment()) * handle.get_alignment()
            _check(handle.async_pwrite(buffer[:padded], file, start), file)
        if size:
            handle.wait()
        with open(os.path.join(path, _INDEX), "w") as index:
            json.dump(dict(zip(state, starts, strict=True)), index)

    def restore(self, path: str, wanted: State) -> State:
        import torch

        handle, buffers = self._engine
        with open(os.path.join(path, _INDEX)) as stored:
            index = json.load(stored)
        state = {name: torch.empty_like(tensor, device="cpu") for name, tensor in wanted.items()}
        names = sorted(wanted, key=lambda name: (index[name], wanted[name].numel()))
        starts, data = [index[name] for name in names], [_bytes(state[name]) for name in names]
        file, block = os.path.join(path, _DATA), len(buffers[0])
        size = os.path.getsize(file)
        turn, ready = 0, _Parts()
        for start in range(0, size, block):
            buffer = buffers[turn % 2][: min(block, size - start)]
            if parts := [*_overlaps(starts, data, start, buffer)]:
                _check(handle.async_pread(buffer, file, start), file)
                _copy_out(ready)  # the block before, during this read
                handle.wait()
                turn, ready = turn + 1, parts
        _copy_out(ready)
        return state

    @cached_property
    def _engine(self) -> tuple[Any, list[torch.Tensor]]:
        import torch
        from deepspeed.ops.op_builder import AsyncIOBuilder

        built = is_built()
        if not built:
            _log.warning("peer:deepspeed-aio: building its async_io operator, which takes minutes")
        _wait_for_lock(_LOAD_S if built else _BUILD_S)
        handle = (
            AsyncIOBuilder()
            .load()
            .aio_handle(
                block_size=self.options.block_size,
                queue_depth=self.options.queue_depth,
                single_submit=self.options.single_submit,
                overlap_events=True,
                intra_op_parallelism=self.options.intra_op_parallelism,
            )
        )
        like = torch.empty(0, dtype=torch.uint8)
        return handle, [handle.new_cpu_locked_tensor(self.options.buffer, like) for _ in range(2)]


def is_built() -> bool:
    """Whether torch's extension directory contains the async_io operator."""
    return any(_extensions().glob("**/async_io/async_io.so"))


def _extensions() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(caches, "torch_extensions")
    return Path(root).expanduser()


def _wait_for_lock(most_s: float) -> None:
    """Wait while another process builds or loads the operator.

    torch makes a file for this time. A killed build leaves it, and torch waits for ever. Raises
    TimeoutError when nothing in the directory has changed for `most_s`.
    """
    for lock in _extensions().glob("**/async_io/lock"):
        while lock.exists():
            with suppress(FileNotFoundError):  # removed meanwhile
                changed_s = max(path.stat().st_mtime for path in [lock, *lock.parent.iterdir()])
                if time.time() - changed_s > most_s:
                    raise TimeoutError(f"{lock} is left by a killed build; remove this file")
            time.sleep(_POLL_S)


def _overlaps(
    starts: list[int], data: list[torch.Tensor], start: int, block: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each part of `data` in the block at offset `start`, and its place in the block.

    `data[i]` begins at offset `starts[i]` of the file, and the starts ascend. Of equal ones only
    the last has bytes.
    """
    stop = start + len(block)
    for at in range(max(bisect_right(starts, start) - 1, 0), bisect_left(starts, stop)):
        own = starts[at]
        begin, end = max(own, start), min(own + len(data[at]), stop)
        if begin < end:
            yield data[at][begin - own : end - own], block[begin - start : end - start]


def _copy_out(parts: _Parts) -> None:
    for part, there in parts:
        part.copy_(there)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.contiguous().view(-1).view(torch.uint8)


def _check(answer: int, path: str) -> None:
    if answer < 0:
        raise OSError(f"{path}: DeepSpeed's aio_handle refused the request ({answer})")
