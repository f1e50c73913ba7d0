"""StagedCheckpoint: a checkpoint directory, visible only when it is complete and durable.

Written aside, every file synced, the manifest last, every directory synced, renamed, the parent
directory synced. Whatever happens before the rename, nobody sees a part of it.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from iobench.errors import TargetError, TransferError
from iobench.writers.files import sync_directory

__all__ = ["MANIFEST", "STAGING_SUFFIX", "StagedCheckpoint"]

MANIFEST = "manifest.json"
"""The file that says what a checkpoint holds; written last."""

STAGING_SUFFIX = ".iobench-staging"


class StagedCheckpoint:
    """A directory beside `final` to write files into; `publish` makes it `final`.

    As a context manager: left without `publish`, everything written is removed.
    Raises TargetError when `final` exists already.
    """

    def __init__(self, final: str | Path) -> None:
        self.final = Path(final)
        self.directory = self.final.with_name(
            f".{self.final.name}.{secrets.token_hex(4)}{STAGING_SUFFIX}"
        )
        self._published = False

    def __enter__(self) -> Self:
        if self.final.exists():
            raise TargetError(f"{self.final} exists; a checkpoint never replaces another in place")
        try:
            self.directory.mkdir()
        except OSError as error:
            raise TransferError.wrap(error, "staging", self.directory) from error
        return self

    def publish(self, manifest: Mapping[str, Any]) -> None:
        """Write the manifest and give the directory its name. On return all of it is durable.

        The files must be synced already; their names and the directories' are synced here.
        Raises TransferError; nothing is visible then.
        """
        try:
            self._write_manifest(manifest)
            for directory, _, _ in os.walk(self.directory, topdown=False):
                sync_directory(directory)
            self.directory.rename(self.final)
            try:
                sync_directory(self.final.parent)
            except OSError:  # the name may not last: it is taken back
                self.final.rename(self.directory)
                raise
            self._published = True
        except OSError as error:
            raise TransferError.wrap(error, "committing", self.final) from error

    def _write_manifest(self, manifest: Mapping[str, Any]) -> None:
        with (self.directory / MANIFEST).open("x") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._published:
            shutil.rmtree(self.directory, ignore_errors=error is not None)
