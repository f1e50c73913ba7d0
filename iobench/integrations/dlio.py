"""DLIO's, and so MLPerf Storage's, checkpointing workload through our writers.

In the workload's YAML:

    checkpoint:
      checkpoint_folder: /mnt/nvme/checkpoints
      checkpoint_mechanism_classname: iobench.integrations.dlio.Checkpointing

The writer is what the variable IOBENCH_WRITER says, a name or the path of a config, else `hybrid`;
or a class of your own says it: `class Mine(Checkpointing): writer = "writer.toml"`.
"""

from __future__ import annotations

import logging
import os
from typing import Any, ClassVar, Self

from iobench.formats import torch_file
from iobench.integrations.default_writer import WriterLike, chosen_writer
from iobench.integrations.needs import needs
from iobench.writers.transfer import Transfer

with needs("dlio_benchmark", "dlio_benchmark @ git+https://github.com/argonne-lcf/dlio_benchmark"):
    from dlio_benchmark.checkpointing.pytorch_checkpointing import PyTorchCheckpointing

__all__ = ["VARIABLE", "Checkpointing"]

VARIABLE = "IOBENCH_WRITER"

_log = logging.getLogger("iobench")


class Checkpointing(PyTorchCheckpointing):  # type: ignore[misc]
    """DLIO's PyTorch checkpoints, each file saved and loaded by a writer's I/O path.

    States, files, their names and when they are saved are DLIO's. Each file is durable when
    `save_state` returns, whether DLIO asks for fsync or not: a time without that says nothing. A
    load reads every byte. `transfers` tells what happened to each file, and `finalize` says the
    sums in DLIO's own output.
    """

    writer: ClassVar[WriterLike | None] = None
    """A Writer, the name of one, or the path of a config; None for the variable's."""

    _only: ClassVar[Any]

    @classmethod
    def get_instance(cls) -> Self:
        """The one object that DLIO asks for."""
        if "_only" not in vars(cls):
            cls._only = cls()
        only: Self = cls._only
        return only

    def __init__(self) -> None:
        """Raises what choosing the writer does."""
        chosen = self.writer if self.writer is not None else os.environ.get(VARIABLE) or "hybrid"
        self._writer = chosen_writer(chosen)
        self.transfers: list[Transfer] = []
        super().__init__()
        self._say(f"Checkpoints by {self._writer!r}")

    def save_state(self, suffix: str, state: Any, fsync: bool = False) -> None:
        """Save one file, durable on return. Raises TransferError."""
        del fsync  # always
        directory, name = os.path.split(self.get_name(suffix))
        self.transfers.append(torch_file.save(state, name, directory, self._writer))

    def load_state(self, suffix: str, state: Any) -> None:
        """Load one file and let go of it, as DLIO does. Raises DataMismatchError, TransferError."""
        del state
        directory, name = os.path.split(self.get_name(suffix))
        loaded, moved = torch_file.load(name, directory, self._writer)
        self.transfers.append(moved)
        assert len(loaded) > 0

    def finalize(self) -> None:
        """Say what was moved by which path, and every fallback."""
        super().finalize()
        for operation in ("write", "read"):
            done = [moved for moved in self.transfers if moved.operation == operation]
            if not done:
                continue
            total = Transfer.total(done)
            paths = ", ".join(f"{path} {count.bytes}" for path, count in total.paths.items())
            self._say(f"{operation}: {total.files} files, {total.bytes} bytes ({paths})")
            for one in total.fallbacks:
                self._say(f"{operation}: {one.wanted} -> {one.used}: {one.reason}")

    def _say(self, text: str) -> None:
        """In DLIO's output, where this DLIO has one."""
        output = getattr(getattr(self, "logger", None), "output", _log.info)
        output(f"iobench: {text}")
