"""peer:dcp: torch.distributed.checkpoint with its FileSystemWriter and FileSystemReader."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from iobench.peers.base import Peer, State
from iobench.writers.options import WriterOptions, option

__all__ = ["Dcp"]


@dataclass(frozen=True, kw_only=True)
class DcpOptions(WriterOptions):
    """Options of `dcp`."""

    thread_count: int = option(
        4, help="Threads that write, one file each.", low=1, high=64, search=(1, 2, 4, 8)
    )


class Dcp(Peer):
    """`dcp.save` and `dcp.load` in one process. The writer syncs its files (`sync_files`).

    The bench syncs them again: torch 2.13 calls fsync for `.metadata` before it flushes the Python
    buffer of that file, and its last bytes are left in the page cache.
    """

    name = "dcp"
    summary = "torch.distributed.checkpoint's FileSystemWriter (sync_files) and Reader"
    modules = ("torch.distributed.checkpoint",)
    Options = DcpOptions
    options: DcpOptions

    def save(self, state: State, path: str) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        writer = FileSystemWriter(path, sync_files=True, thread_count=self.options.thread_count)
        with _one_process():
            save(dict(state), storage_writer=writer, no_dist=True)

    def restore(self, path: str, wanted: State) -> State:
        import torch
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        state: dict[str, Any] = {
            name: torch.empty_like(tensor, device="cpu") for name, tensor in wanted.items()
        }
        with _one_process():
            load(state, storage_reader=FileSystemReader(path), no_dist=True)
        return state


@contextmanager
def _one_process() -> Iterator[None]:
    """Suppress torch's warning about a single process, which is intended here.

    DCP's CheckpointException is a BaseException that also hides Ctrl-C: its cause is raised here.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        (cause, _), *_ = error.failures.values()
        if isinstance(cause, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise RuntimeError(f"DCP: {type(cause).__name__}: {cause}") from error
