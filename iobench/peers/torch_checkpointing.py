"""peer:torch-checkpointing: Meta's torch_checkpointing, with its synchronous saver."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from iobench.peers.base import Peer, State
from iobench.writers.options import WriterOptions, option

_ITEM = "model"


@dataclass(frozen=True, kw_only=True)
class TorchCheckpointingOptions(WriterOptions):
    """Options of `torch-checkpointing`."""

    direct: bool = option(False, help="Write with O_DIRECT, which its storage does by default.")


class TorchCheckpointing(Peer):
    """`CheckpointManager`: the synchronous saver, then fsync by the bench; loads in parallel.

    The asynchronous saver, its default, writes the same file by the same code in a child process.
    Its storage opens files with O_DIRECT by default, and writes blocks of any length to them: ext4
    and XFS refuse that with EINVAL (seen with 0.1.1), so `direct` is off here.
    """

    name = "torch-checkpointing"
    summary = "torch_checkpointing's CheckpointManager: synchronous saver, loader, with fsync"
    modules = ("torch_checkpointing",)
    packages = "torch-checkpointing"
    Options = TorchCheckpointingOptions
    options: TorchCheckpointingOptions

    def save(self, state: State, path: str) -> None:
        self._manager.save(path, {_ITEM: dict(state)})

    def restore(self, path: str, wanted: State) -> State:
        # Its loader reads the whole file into one anonymous mapping, whose slices the tensors are.
        # Without a target it copies nothing; with one it would copy every tensor once more.
        loaded: State = self._manager.load(os.fspath(path), into={_ITEM: None})[_ITEM]
        return {name: loaded[name] for name in wanted}

    @cached_property
    def _manager(self) -> Any:
        """One for all saves and loads, like in a training."""
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.config import SyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        return CheckpointManager(
            CheckpointManager.Config(
                save=SyncCheckpointSaverConfig(),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=self.options.direct),
            )
        )
