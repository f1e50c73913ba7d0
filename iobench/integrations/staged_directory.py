"""StagedDirectory: a checkpoint directory that has its name only when all of it is durable."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from iobench.checkpoint.staged import STAGING_SUFFIX, exchange
from iobench.errors import TransferError
from iobench.writers.files import sync_directory

__all__ = ["StagedDirectory"]


class StagedDirectory:
    """`path` is written to, somewhere in the hidden directory `root`; `publish` makes it `final`.

    All three are on one file system. With several processes one calls `begin`, `publish` and
    `discard`, all write. What a killed process leaves behind is `root`, which `begin` clears.
    """

    def __init__(self, final: str | os.PathLike[str], *, root: Path | None = None) -> None:
        """`root`: `.NAME.iobench-staging` beside `final`, unless given."""
        self.final = Path(os.path.abspath(final))
        beside = self.final.with_name(f".{self.final.name}{STAGING_SUFFIX}")
        self.root = beside if root is None else root
        self.path = self.root / self.final.name

    def begin(self) -> None:
        """Make an empty `root`. Raises TransferError."""
        try:
            self.discard()
            self.root.mkdir(parents=True)
        except OSError as error:
            raise TransferError.wrap(error, "staging", self.root) from error

    def publish(self, *, keep_others: bool = False) -> None:
        """Sync every file and directory of `path`, and let it take the place of `final` at once.

        On return it is durable under its name. What `final` was is removed; with `keep_others`,
        entries that the new directory has none for stay. Raises TransferError; `final` is as before
        then.
        """
        try:
            if keep_others and self.final.is_dir():
                _adopt(self.final, self.path)
            _sync_tree(self.path)
            self.final.parent.mkdir(parents=True, exist_ok=True)
            give = self._exchange if self.final.exists() else self._rename
            give()
            try:
                sync_directory(self.final.parent)
            except OSError:  # the name may not last: it is taken back
                self._exchange() if give == self._exchange else self.final.rename(self.path)
                raise
            self.discard()
        except OSError as error:
            raise TransferError.wrap(error, "publishing", self.final) from error

    def discard(self) -> None:
        """Remove `root` and all in it; none is there is none to remove."""
        if self.root.exists():
            shutil.rmtree(self.root)

    def _rename(self) -> None:
        self.path.rename(self.final)

    def _exchange(self) -> None:
        exchange(self.path, self.final, self.root / "replaced")


def _adopt(old: Path, new: Path) -> None:
    """Give `new` the entries of `old` that it has none for: further names, not copies."""
    for entry in old.iterdir():
        ours = new / entry.name
        if ours.exists() or ours.is_symlink():
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, ours, symlinks=True, copy_function=_link)
        else:
            _link(str(entry), str(ours))


def _link(source: str, target: str) -> None:
    os.link(source, target, follow_symlinks=False)


def _sync_tree(directory: Path) -> None:
    for path, _, files in os.walk(directory, topdown=False):
        _sync_files(Path(path, name) for name in files)
        sync_directory(path)


def _sync_files(files: Iterable[Path]) -> None:
    for file in files:
        if file.is_symlink():
            continue
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
