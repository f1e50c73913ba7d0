"""The checkpointing workload of DLIO, and so of MLPerf Storage, through a writer.

In the workload's YAML:

    checkpoint:
      checkpoint_folder: /mnt/nvme/checkpoints
      checkpoint_mechanism_classname: iobench.integrations.dlio.Checkpointing

The environment variable IOBENCH_WRITER selects the writer: a name or the path of a config; the
default is `hybrid`. A subclass can select it too: `class Mine(Checkpointing): writer = "odirect"`.
"""

from __future__ import annotations

import logging
import os
from typing import Any, ClassVar, Self

from iobench.formats import torch_file
from iobench.integrations.default_writer import chosen_writer
from iobench.integrations.needs import needs
from iobench.writers.config import WriterLike
from iobench.writers.transfer import Transfer

with needs("dlio_benchmark", "dlio_benchmark @ git+https://github.com/argonne-lcf/dlio_benchmark"):
    from dlio_benchmark.checkpointing.pytorch_checkpointing import PyTorchCheckpointing

__all__ = ["VARIABLE", "Checkpointing"]

VARIABLE = "IOBENCH_WRITER"
"""The environment variable that selects the writer."""

_log = logging.getLogger("iobench")


class Checkpointing(PyTorchCheckpointing):  # type: ignore[misc]  # untyped package
    """DLIO's PyTorch checkpoints; a writer saves and loads each file.

    DLIO decides on states, files, names and schedule. Each file is durable when `save_state`
    returns, even if DLIO requests no fsync: a time without a sync measures the page cache. A load
    reads every byte. `transfers` has one Transfer per file; `finalize` prints the sums in DLIO's
    output.
    """

    writer: ClassVar[WriterLike | None] = None
    """A Writer, the name of one, or the path of a config; None for the environment variable's."""

    _only: ClassVar[Any]

    @classmethod
    def get_instance(cls) -> Self:
        """Return the one object of this class that DLIO uses."""
        if "_only" not in vars(cls):
            cls._only = cls()
        only: Self = cls._only
        return only

    def __init__(self) -> None:
        """Raises the errors of choosing the writer."""
        chosen = self.writer if self.writer is not None else os.environ.get(VARIABLE) or "hybrid"
        self._writer = chosen_writer(chosen)
        self.transfers: list[Transfer] = []
        super().__init__()
        self._print(f"Checkpoints by {self._writer!r}")

    def save_state(self, suffix: str, state: Any, fsync: bool = False) -> None:
        """Save one file, durable on return. Raises TransferError."""
        del fsync  # always
        directory, name = os.path.split(self.get_name(suffix))
        self.transfers.append(torch_file.save(state, name, directory, self._writer))

    def load_state(self, suffix: str, state: Any) -> None:
        """Load one file and discard it, as DLIO does. Raises DataMismatchError, TransferError."""
        del state
        directory, name = os.path.split(self.get_name(suffix))
        loaded, moved = torch_file.load(name, directory, self._writer)
        self.transfers.append(moved)
        assert len(loaded) > 0

    def finalize(self) -> None:
        """Print the bytes by path, and every fallback."""
        super().finalize()
        for operation in ("write", "read"):
            done = [moved for moved in self.transfers if moved.operation == operation]
            if not done:
                continue
            total = Transfer.total(done)
            paths = ", ".join(f"{path} {count.bytes}" for path, count in total.paths.items())
            self._print(f"{operation}: {total.files} files, {total.bytes} bytes ({paths})")
            for one in total.fallbacks:
                self._print(f"{operation}: {one.wanted} -> {one.used}: {one.reason}")

    def _print(self, text: str) -> None:
        """Write a line to DLIO's output, or to the log if this DLIO has no such logger."""
        output = getattr(getattr(self, "logger", None), "output", _log.info)
        output(f"iobench: {text}")
