"""OptimizerRecord: what `iobench train --optimizer` has measured, and its file.

The file is one line of JSON with the schema `iobench.train.optimizer/1`. Nothing here needs torch.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iobench.errors import ResultFileError
from iobench.results import Environment, check_new
from iobench.results.codec import from_plain, to_plain
from iobench.results.writer import append_line

__all__ = [
    "SCHEMA",
    "STATE_BYTES",
    "MeasuredCheckpoint",
    "MeasuredOptimizer",
    "MeasuredRestore",
    "OptimizerRecord",
]

SCHEMA = "iobench.train.optimizer/1"
_FAMILY, _VERSION = SCHEMA.split("/")
STATE_BYTES = 14
"""Of a parameter in a checkpoint: 12 of masters and moments, 2 of the parameter."""


@dataclass(frozen=True, kw_only=True)
class MeasuredCheckpoint:
    """One checkpoint. `stall_s`: until training may go on. `durable_s`: until it is durable.

    `written_bytes` are those of this process (write_bytes of /proc/self/io), `device_bytes` those
    of the device, for all processes; None where there is no device.
    """

    method: str
    repetition: int
    stall_s: float
    durable_s: float
    written_bytes: int
    device_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class MeasuredRestore:
    """A restore until training can go on. `cached_bytes` of its files were in the page cache.

    `equal`: the parameters have the bits that they had at the checkpoint.
    """

    method: str
    repetition: int
    cached_bytes: int
    elapsed_s: float
    read_bytes: int
    device_bytes: int | None
    equal: bool


@dataclass(frozen=True, kw_only=True)
class MeasuredOptimizer:
    """One optimizer: medians are left to the reader. `step_s` is per block the time of a step until
    all of its steps are done, also on storage; `update_s` the calls of step() alone.

    `memory_bytes` is by how much it made this process larger (VmRSS, mapped files included).
    `losses_equal`: all losses have the bits of the first optimizer's.
    """

    name: str
    step_s: tuple[float, ...]
    update_s: tuple[float, ...]
    written_bytes_per_step: tuple[float, ...]
    memory_bytes: int
    checkpoints: tuple[MeasuredCheckpoint, ...]
    restores: tuple[MeasuredRestore, ...]
    losses_equal: bool


@dataclass(frozen=True, kw_only=True)
class OptimizerRecord:
    """Several optimizers on the same training. `state_bytes`: of a whole checkpoint."""

    run_id: str
    started_at: str
    command: tuple[str, ...]
    environment: Environment
    target: str
    parameters: int
    state_bytes: int
    steps: int
    repeat: int
    model_params: int
    memory: str
    seed: int
    optimizers: tuple[MeasuredOptimizer, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values, the schema first."""
        return {"schema": SCHEMA, **to_plain(self)}

    def write(self, path: Path) -> None:
        """Write it to a new file; durable on return. Raises ResultFileError."""
        check_new(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666
            )
        except OSError as error:
            raise ResultFileError(f"{path} cannot be created: {error.strerror}") from error
        try:
            append_line(fd, path, self.to_json())
            os.fsync(fd)
        finally:
            os.close(fd)

    @classmethod
    def read(cls, path: Path) -> OptimizerRecord | None:
        """Return the record at `path`; None for a file of another kind, or that cannot be read.

        Raises ResultFileError for a damaged one and for one of a newer iobench.
        """
        family = f'{{"schema": "{_FAMILY}/'.encode()
        try:
            data = path.read_bytes() if path.is_file() else b""
        except OSError:
            return None
        if not data.startswith(family):
            return None
        try:
            found = json.loads(data)
            version = str(found["schema"]).partition("/")[2]
            if version != _VERSION:
                raise ResultFileError(
                    f"{path}: written by another iobench (schema {found['schema']}); this one "
                    f"reads {SCHEMA}"
                )
            return from_plain(cls, found)
        except ResultFileError:
            raise
        except (ValueError, TypeError, KeyError) as error:
            raise ResultFileError(f"{path}: damaged ({error})") from error
