"""Lightning's checkpoints through our writers: `CheckpointIO`, and `AsyncCheckpointIO`.

    from iobench.integrations.lightning import AsyncCheckpointIO, CheckpointIO

    Trainer(plugins=[CheckpointIO("writer.toml")])
    Trainer(plugins=[AsyncCheckpointIO("odirect")])

Files are those of torch.save: stock Lightning loads them, and these load stock Lightning's.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from typing import Any

from iobench.checkpoint.background import BackgroundFiles, absolute
from iobench.checkpoint.save import Save
from iobench.errors import OptionError
from iobench.formats import torch_file
from iobench.integrations import torch_dropins
from iobench.integrations.default_writer import WriterLike, chosen_writer
from iobench.integrations.needs import needs
from iobench.integrations.removal import remove_file
from iobench.units import parse_size
from iobench.writers.transfer import Transfer

with needs("lightning", "lightning>=2.4"):
    from lightning.fabric.plugins import CheckpointIO as StockCheckpointIO

__all__ = ["AsyncCheckpointIO", "CheckpointIO"]

Path = str | os.PathLike[str]

_REMEMBERED = 1000


class CheckpointIO(StockCheckpointIO):  # type: ignore[misc]
    """Saves and loads checkpoints, files or `s3://bucket/key`, by a writer's I/O path.

    A checkpoint has its name only when all of it is durable; a save that fails or is killed leaves
    what was there before. `transfers` tells what happened to the last 1,000 saves.
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
        directory, name = _place(path, storage_options)
        self.transfers.append(torch_file.save(checkpoint, name, directory, self._writer))

    def load_checkpoint(
        self, path: Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """What `torch.load` returns, read by the writer; on the CPU unless told otherwise.

        Raises what torch.load does; FileNotFoundError where there is no checkpoint.
        """
        location = "cpu" if map_location is None else map_location
        loaded: dict[str, Any] = torch_dropins.load(
            os.fspath(path), location, weights_only=weights_only, writer=self._writer
        )
        return loaded

    def remove_checkpoint(self, path: Path) -> None:
        """Remove the checkpoint at `path`, durably; none there is none to remove."""
        with contextlib.suppress(FileNotFoundError):
            remove_file(os.fspath(path), self._writer)


class AsyncCheckpointIO(CheckpointIO):
    """`CheckpointIO` that copies the checkpoint, returns, and writes it in the background.

    - `slots` copies at most are in host memory; with none free a save waits. `budget` bounds their
      sum in bytes (`"16GiB"`)
    - Every checkpoint is written, in order, and is visible only when it is durable.
    - A checkpoint that Lightning removes, as one that a newer one replaces, goes once all saves
      before are durable: whenever the job is killed, one is there.
    - What fails in the background is raised by the next save or removal, and by `teardown`, which
      `Trainer.fit` ends with. The old checkpoint stays then.

    `saves` tells what became of each.
    """

    def __init__(
        self, writer: WriterLike = "hybrid", *, slots: int = 2, budget: int | str | None = None
    ) -> None:
        super().__init__(writer)
        self._background = BackgroundFiles(
            self._writer, slots=slots, budget_bytes=None if budget is None else parse_size(budget)
        )

    @property
    def saves(self) -> tuple[Save, ...]:
        """What became of the last 1,000 saves, oldest first."""
        return tuple(self._background.saves)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Path, storage_options: Any = None
    ) -> None:
        """Copy `checkpoint`, which may change on return; it is not durable yet, see `wait`.

        Raises what failed before (nothing is copied then), StateError where there is too little
        memory for the copies, OptionError.
        """
        directory, name = _place(path, storage_options)
        step = checkpoint.get("global_step", 0)
        self._background.save(checkpoint, os.path.join(directory, name), step=step)

    def load_checkpoint(
        self, path: Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """As `CheckpointIO.load_checkpoint`, once every save is durable."""
        self._background.wait()
        return super().load_checkpoint(path, map_location, weights_only)

    def remove_checkpoint(self, path: Path) -> None:
        """Remove the checkpoint at `path` as soon as every save before is durable."""
        remove, file = super().remove_checkpoint, absolute(path)
        self._background.afterwards(lambda: remove(file))

    def wait(self) -> None:
        """Wait until every save is durable. Raises what failed."""
        self._background.wait()

    def teardown(self) -> None:
        """Wait for every save, give the memory back, and raise what failed."""
        self._background.close()


def _place(path: Path, storage_options: Any) -> tuple[str, str]:
    """The directory, or prefix, and the name of the file. Raises OptionError."""
    if storage_options is not None:
        raise OptionError(
            f"storage_options={storage_options!r}: a writer takes none; set its own options"
        )
    directory, name = os.path.split(os.fspath(path))
    return directory or ".", name
