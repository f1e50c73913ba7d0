"""CheckpointStore: where the checkpoints of a run lie, each under its step's name."""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.staged import (
    MANIFEST,
    REPLACED_SUFFIX,
    STAGING_SUFFIX,
    StagedCheckpoint,
    put_back,
)
from iobench.errors import TargetError, TransferError
from iobench.writers.base import Writer
from iobench.writers.files import PART_SUFFIX, sync_directory
from iobench.writers.freeing import remove_tree
from iobench.writers.s3_target import is_s3

__all__ = ["CheckpointStore", "DirectoryStore", "Staged", "store_at"]

_STEP = re.compile(r"step-(0|[1-9][0-9]*)")


class Staged(Protocol):
    """A checkpoint being written; not one before `publish`."""

    @property
    def directory(self) -> str | Path:
        """Where its files go until it is published."""

    def publish(self, manifest: Mapping[str, Any]) -> None:
        """Make it a checkpoint: durable and visible on return."""


class CheckpointStore(Protocol):
    """The checkpoints of one run."""

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, those that have a manifest, ascending."""

    def manifest(self, step: int) -> Manifest:
        """What the checkpoint holds. Raises DataMismatchError when the manifest is damaged."""

    def locate(self, step: int) -> str | Path:
        """Where the files of the checkpoint are."""

    def staged(self, step: int, *, replace: bool = False) -> AbstractContextManager[Staged]:
        """The new checkpoint; removed when the block is left without `publish`.

        With `replace` it may take the place of another, which stays until then and is removed
        after it; that it cannot be removed raises TransferError.
        """

    def remove(self, step: int) -> None:
        """Remove the checkpoint; from the first moment on it is none any more."""

    def clean(self) -> None:
        """Remove what killed processes left half written, half removed or replaced."""


def store_at(location: str | Path, writer: Writer) -> CheckpointStore:
    """The store at a directory, or at `s3://bucket/prefix`. Raises UsageError for other writers."""
    writer.check_scheme(location)
    if is_s3(location):
        from iobench.checkpoint.object_store import ObjectStore

        return ObjectStore(str(location), writer)
    return DirectoryStore(Path(location))


def name_of(step: int) -> str:
    """`step-20`: the name of a checkpoint."""
    return f"step-{step}"


def step_of(name: str) -> int | None:
    """The step in the name of a checkpoint; None for another name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


class DirectoryStore:
    """Checkpoints in a directory; a half-written or half-removed one bears a hidden name."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __str__(self) -> str:
        return str(self.directory)

    def steps(self) -> list[int]:
        if not self.directory.is_dir():
            raise TargetError(f"{self.directory}: no such directory")
        found = ((step_of(path.name), path) for path in self.directory.iterdir())
        return sorted(
            step for step, path in found if step is not None and (path / MANIFEST).is_file()
        )

    def manifest(self, step: int) -> Manifest:
        file = self.locate(step) / MANIFEST
        try:
            return Manifest.parse(file.read_bytes(), str(file))
        except OSError as error:
            raise TransferError.wrap(error, "reading", file) from error

    def locate(self, step: int) -> Path:
        return self.directory / name_of(step)

    def staged(self, step: int, *, replace: bool = False) -> StagedCheckpoint:
        return StagedCheckpoint(self.locate(step), replace=replace)

    def remove(self, step: int) -> None:
        path = self.locate(step)
        aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}{STAGING_SUFFIX}")
        try:
            path.rename(aside)
            sync_directory(self.directory)
            remove_tree(aside)
        except OSError as error:
            raise TransferError.wrap(error, "removing", path) from error

    def clean(self) -> None:
        for aside in self.directory.glob(f".step-*{REPLACED_SUFFIX}"):
            try:
                put_back(aside)
            except OSError as error:
                raise TransferError.wrap(error, "restoring", aside) from error
        staged = self.directory.glob(f".step-*{STAGING_SUFFIX}")
        for path in (*staged, *self.directory.glob(f".probe.*{PART_SUFFIX}")):
            try:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            except OSError as error:
                raise TransferError.wrap(error, "removing", path) from error
