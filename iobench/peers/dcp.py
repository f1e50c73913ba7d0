"""peer:dcp: torch.distributed.checkpoint with its FileSystemWriter and FileSystemReader."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from iobench.peers.base import Peer, State
from iobench.writers.options import WriterOptions, option

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["Dcp"]

_ALONE = "torch.distributed is disabled"


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
    trains = True
    Options = DcpOptions
    options: DcpOptions

    def save(self, state: State, path: str) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        with _one_process():
            save(dict(state), storage_writer=self._writer(path), no_dist=True)

    def save_async(self, state: Any, path: str) -> Callable[[], None]:
        """As `dcp.async_save` does with its defaults: it copies, and a thread of its own saves."""
        from torch.distributed.checkpoint.state_dict_saver import async_save

        # Its thread warns at any time.
        warnings.filterwarnings("ignore", message=_ALONE)
        with _one_process():
            saving = async_save(dict(state), storage_writer=self._writer(path), no_dist=True)
        future = cast("Future[Any]", saving)  # the other class is that of an asynchronous stager

        def end() -> None:
            with _one_process():
                future.result()

        return end

    def restore(self, path: str, wanted: State) -> State:
        import torch
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load
        from torch.utils import _pytree

        state: dict[str, Any] = _pytree.tree_map_only(
            torch.Tensor, lambda tensor: torch.empty_like(tensor, device="cpu"), dict(wanted)
        )
        with _one_process():
            load(state, storage_reader=FileSystemReader(path), no_dist=True)
        return state

    def _writer(self, path: str) -> Any:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        return FileSystemWriter(path, sync_files=True, thread_count=self.options.thread_count)


@contextmanager
def _one_process() -> Iterator[None]:
    """Suppress torch's warning about a single process, which is intended here.

    DCP's CheckpointException is a BaseException that also hides Ctrl-C: its cause is raised here.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_ALONE)
            yield
    except CheckpointException as error:
        (cause, _), *_ = error.failures.values()
        if isinstance(cause, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise RuntimeError(f"DCP: {type(cause).__name__}: {cause}") from error
