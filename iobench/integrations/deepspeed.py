"""DeepSpeed's checkpoints through a writer.

    from iobench.integrations.deepspeed import attach

    engine, *_ = deepspeed.initialize(...)
    attach(engine, "writer.toml")               # or decoupled=True: in the background
    engine.save_checkpoint("runs/a")
    engine.load_checkpoint("runs/a")

DeepSpeed's config accepts only its own checkpoint engines, so `attach` replaces the one that it
made. The files are those of DeepSpeed's TorchCheckpointEngine: it loads ours, and we load its own.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from iobench.checkpoint.save import Save
from iobench.errors import TransferError, UsageError, transfer_errors
from iobench.formats import torch_file
from iobench.integrations import torch_dropins
from iobench.integrations.background import BackgroundFiles
from iobench.integrations.default_writer import chosen_writer
from iobench.integrations.needs import needs
from iobench.writers.blocks import interpreter_end
from iobench.writers.buffered import BufferedWriter
from iobench.writers.config import WriterLike
from iobench.writers.image import FileImage
from iobench.writers.local.new_file import sync_directory
from iobench.writers.s3_store.target import is_s3
from iobench.writers.transfer import Transfer

with needs("deepspeed", "deepspeed>=0.17"):
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import (
        CheckpointCommitInfo,
    )
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import (
        CheckpointEngine as StockCheckpointEngine,
    )

__all__ = ["CheckpointEngine", "DecoupledCheckpointEngine", "attach"]

_REMEMBERED = 1000


class CheckpointEngine(StockCheckpointEngine):  # type: ignore[misc]  # untyped package
    """Saves and loads each file of a checkpoint by a writer's I/O path.

    A file gets its name when it is complete and durable. `commit` makes the names durable too;
    DeepSpeed calls it before it writes the checkpoint's name to `latest`. DeepSpeed writes `latest`
    itself, without a sync. `transfers` has the Transfers of the last 1,000 files.
    """

    def __init__(self, writer: WriterLike = "hybrid", config_params: Any = None) -> None:
        """`writer`: a Writer, the name of one, or the path of a config. Raises UsageError."""
        super().__init__(config_params)
        self.name = type(self).__name__
        self.transfers: deque[Transfer] = deque(maxlen=_REMEMBERED)
        self._writer = chosen_writer(writer)
        self._directories: set[str] = set()

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a checkpoint: nothing to do here."""
        del info

    def save(self, state_dict: Any, path: str) -> None:
        """Save to `path`. The bytes are durable on return. Raises TransferError."""
        directory, name = os.path.split(path)
        self._directories.add(directory)
        self.transfers.append(
            torch_file.save(state_dict, name, directory, self._writer, sync_directory=False)
        )

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return what `torch.load(path, map_location, weights_only=False)` returns."""
        return torch_dropins.load(path, map_location, weights_only=False, writer=self._writer)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Make the names of this rank's files durable. Raises TransferError."""
        base = os.path.abspath(info.save_dir) if info is not None else ""
        gained = {above for path in self._directories for above in _up_to(path, base)}
        for directory in sorted(gained):
            with transfer_errors("committing", directory):
                sync_directory(directory)
        self._directories.clear()
        return True


class DecoupledCheckpointEngine(CheckpointEngine):
    """`CheckpointEngine` that copies each state and writes the copy in the background.

    DeepSpeed commits before its next optimizer step. `commit` waits until the checkpoint is durable
    on every rank and raises the error of a failed save, so `latest` never names an incomplete
    checkpoint. At most `slots` copies are in host memory; `budget` limits their sum in bytes
    (`"16GiB"`). `saves` has the outcome of each file.
    """

    def __init__(
        self,
        writer: WriterLike = "hybrid",
        config_params: Any = None,
        *,
        slots: int = 2,
        budget: int | str | None = None,
    ) -> None:
        super().__init__(writer, config_params)
        self._background = BackgroundFiles(self._writer, slots=slots, budget=budget)
        self._info: CheckpointCommitInfo | None = None
        self._failure: Exception | None = None
        # DeepSpeed's `__del__` calls cleanup too, but logs an error as "debug" and exits with 0.
        interpreter_end.at_end(self, DecoupledCheckpointEngine.cleanup)

    @property
    def saves(self) -> tuple[Save, ...]:
        """The outcomes of the last 1,000 files, oldest first."""
        return tuple(self._background.saves)

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a checkpoint. The one before is committed first, with its `latest`."""
        if self._info is not None:
            self._finish(self._info)
        self._info, self._failure = info, None

    def save(self, state_dict: Any, path: str) -> None:
        """Copy `state_dict`, which may change on return.

        Raises the error of an earlier save, and StateError.
        """
        self._directories.add(os.path.dirname(path))
        with self._remembered():
            self._background.save(state_dict, path)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Wait until every save is durable, then load like `CheckpointEngine.load`."""
        with self._remembered():
            self._background.wait()
        return super().load(path, map_location)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Wait until the files and their names are durable. Raises the error of a failed save.

        It raises that error even if `save` already raised it. With `info.save_latest` all ranks
        must call this and wait for each other; TransferError if another rank failed.
        """
        self._info = None
        # The error is raised below: the other ranks wait for this one in the all-reduce.
        with suppress(Exception), self._remembered():
            self._background.wait()
            super().commit(info)
        failure, self._failure = self._failure, None
        durable = _on_every_rank(failure is None) if info.save_latest else True
        if failure is not None:
            raise failure
        if not durable:
            raise TransferError(
                f"checkpoint {info.tag} in {info.save_dir}: another rank failed to save its part"
            )
        return True

    def is_decoupled(self) -> bool:
        """Return True: DeepSpeed commits a checkpoint some steps after its save."""
        return True

    def get_commit_info(self) -> CheckpointCommitInfo | None:
        """The checkpoint that is not committed yet."""
        return self._info

    def cleanup(self) -> None:
        """Commit a checkpoint in progress and free the memory. DeepSpeed calls this at its end.

        Rank 0 then writes `latest`, as DeepSpeed does after every other commit. If one of several
        ranks ends with an error, it makes its files durable and does not commit: the other ranks
        continue and do not take part.
        """
        info, self._info = self._info, None
        try:
            several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
            if info is not None and not (several and _ends_by_error()):
                self._finish(info)
        finally:
            self._background.close()

    def _finish(self, info: CheckpointCommitInfo) -> None:
        """Commit, and write `latest` if `info` requests it, as DeepSpeed does before a step."""
        self.commit(info)
        if info.save_latest and _rank() == 0:
            latest = FileImage.of("latest", [str(info.tag).encode()])
            BufferedWriter().write(latest, info.save_dir)

    @contextmanager
    def _remembered(self) -> Iterator[None]:
        """Record an error inside the block as the failure of the checkpoint in progress."""
        try:
            yield
        except Exception as error:
            self._failure = self._failure or error
            raise


def attach(
    engine: Any, writer: WriterLike = "hybrid", *, decoupled: bool = False, **options: Any
) -> CheckpointEngine:
    """Let a DeepSpeedEngine save and load by `writer`. Return its new CheckpointEngine.

    `decoupled`: save in the background; `options` are those of `DecoupledCheckpointEngine`. Raises
    UsageError if `engine` is not a DeepSpeedEngine, and the errors of choosing the writer.
    """
    before = getattr(engine, "checkpoint_engine", None)
    if not isinstance(before, StockCheckpointEngine):
        raise UsageError(
            f"{type(engine).__name__} has no checkpoint_engine; attach to the engine, the first "
            "value that deepspeed.initialize returns"
        )
    made = (DecoupledCheckpointEngine if decoupled else CheckpointEngine)(writer, **options)
    before.cleanup()
    engine.checkpoint_engine = made
    return made


def _rank() -> int:
    if torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK") or 0)


def _on_every_rank(durable: bool) -> bool:
    """Whether `durable` is true on all ranks, which wait for each other here."""
    if not torch.distributed.is_initialized():
        return durable
    flag = torch.tensor([int(durable)], device=get_accelerator().current_device_name())
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN)
    return bool(flag.item())


def _ends_by_error() -> bool:
    """Whether an exception is being handled now, or ended the script."""
    ended = (interpreter_end.begun() or sys.is_finalizing()) and getattr(
        sys, "last_value", None
    ) is not None
    return ended or sys.exc_info()[0] is not None


def _up_to(path: str, base: str) -> list[str]:
    """Return `path` and the directories above it, up to the parent of `base`, which may be new."""
    if is_s3(path):
        return []
    directory = Path(os.path.abspath(path or "."))
    found = [str(directory)]
    if base and directory.is_relative_to(base):
        top = Path(base).parent
        while directory != top:
            directory = directory.parent
            found.append(str(directory))
    return found
