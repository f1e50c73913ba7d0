"""Lightning's checkpoints through a writer: `CheckpointIO` and `AsyncCheckpointIO`.

    from iobench.integrations.lightning import AsyncCheckpointIO, CheckpointIO

    Trainer(plugins=[CheckpointIO("writer.toml")])
    Trainer(plugins=[AsyncCheckpointIO("odirect")])

The files are those of torch.save: stock Lightning loads ours, and these classes load its own.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from typing import Any

from iobench.checkpoint.save import Save
from iobench.errors import OptionError
from iobench.formats import torch_file
from iobench.integrations import torch_dropins
from iobench.integrations.background import BackgroundFiles, absolute
from iobench.integrations.default_writer import chosen_writer
from iobench.integrations.needs import needs
from iobench.writers.config import WriterLike
from iobench.writers.removal import remove_file
from iobench.writers.transfer import Transfer

with needs("lightning", "lightning>=2.4"):
    from lightning.fabric.plugins import CheckpointIO as StockCheckpointIO

__all__ = ["AsyncCheckpointIO", "CheckpointIO"]

Path = str | os.PathLike[str]

_REMEMBERED = 1000


class CheckpointIO(StockCheckpointIO):  # type: ignore[misc]  # untyped package
    """Saves and loads checkpoints, files or `s3://bucket/key`, by a writer's I/O path.

    A checkpoint gets its name when all of it is durable. A save that fails or is killed leaves the
    old file. `transfers` has the Transfers of the last 1,000 saves.
    """

    def __init__(self, writer: WriterLike = "hybrid") -> None:
        """`writer`: a Writer, the name of one, or the path of a config. Raises UsageError."""
        super().__init__()
        self._writer = chosen_writer(writer)
        self.transfers: deque[Transfer] = deque(maxlen=_REMEMBERED)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Path, storage_options: Any = None
    ) -> None:
        """Save to `path`, durable on return. Raises TransferError, OptionError."""
        directory, name = _split(path, storage_options)
        self.transfers.append(torch_file.save(checkpoint, name, directory, self._writer))

    def load_checkpoint(
        self, path: Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return what `torch.load` returns; the writer reads the file. The default is the CPU.

        Raises the errors of torch.load, and FileNotFoundError if the checkpoint does not exist.
        """
        location = "cpu" if map_location is None else map_location
        loaded: dict[str, Any] = torch_dropins.load(
            os.fspath(path), location, weights_only=weights_only, writer=self._writer
        )
        return loaded

    def remove_checkpoint(self, path: Path) -> None:
        """Remove the checkpoint at `path` durably, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            remove_file(os.fspath(path), self._writer)


class AsyncCheckpointIO(CheckpointIO):
    """`CheckpointIO` that copies the checkpoint, returns, and writes the copy in the background.

    - At most `slots` copies are in host memory; a save waits for a free slot. `budget` limits their
      sum in bytes (`"16GiB"`).
    - All checkpoints are written, in order. Each becomes visible when it is durable.
    - A checkpoint that Lightning removes, such as one that a newer one replaces, is deleted after
      all earlier saves are durable. So a job that is killed always leaves a checkpoint.
    - The next save or removal raises an error of the background, and so does `teardown`, which
      `Trainer.fit` calls at its end. The old checkpoint stays in that case.

    `saves` has the outcome of each save.
    """

    def __init__(
        self, writer: WriterLike = "hybrid", *, slots: int = 2, budget: int | str | None = None
    ) -> None:
        super().__init__(writer)
        self._background = BackgroundFiles(self._writer, slots=slots, budget=budget)

    @property
    def saves(self) -> tuple[Save, ...]:
        """The outcomes of the last 1,000 saves, oldest first."""
        return tuple(self._background.saves)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Path, storage_options: Any = None
    ) -> None:
        """Copy `checkpoint`, which may change on return. It is durable only after `wait`.

        Raises the error of an earlier save (nothing is copied then), StateError if there is too
        little memory for the copies, and OptionError.
        """
        directory, name = _split(path, storage_options)
        step = checkpoint.get("global_step", 0)
        self._background.save(checkpoint, os.path.join(directory, name), step=step)

    def load_checkpoint(
        self, path: Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Wait until every save is durable, then load like `CheckpointIO.load_checkpoint`."""
        self._background.wait()
        return super().load_checkpoint(path, map_location, weights_only)

    def remove_checkpoint(self, path: Path) -> None:
        """Remove the checkpoint at `path` after every earlier save is durable."""
        remove, file = super().remove_checkpoint, absolute(path)
        self._background.afterwards(lambda: remove(file))

    def wait(self) -> None:
        """Wait until every save is durable. Raises the error of a failed save."""
        self._background.wait()

    def teardown(self) -> None:
        """Wait for every save and free the memory. Raises the error of a failed save."""
        self._background.close()


def _split(path: Path, storage_options: Any) -> tuple[str, str]:
    """Return the directory, or prefix, and the name of the file. Raises OptionError."""
    if storage_options is not None:
        raise OptionError(
            f"storage_options={storage_options!r}: not supported; set the writer's options instead"
        )
    directory, name = os.path.split(os.fspath(path))
    return directory or ".", name
