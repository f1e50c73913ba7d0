"""StagedDirectory: a checkpoint directory that gets its name when all of it is durable."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path

from iobench import linux
from iobench.checkpoint.staged import STAGING_SUFFIX, exchange, reraise
from iobench.errors import UsageError, transfer_errors
from iobench.writers.local.deferred_free import remove_tree
from iobench.writers.local.file_metadata import copy_owner, existing_file
from iobench.writers.local.new_file import make_directories, sync_directory

__all__ = ["StagedDirectory"]


class StagedDirectory:
    """Write to `path`, inside the hidden directory `root`; `publish` gives it the name `final`.

    All three are on one file system. Of several processes one calls `begin`, `publish` and
    `discard`, and all write. A killed process leaves `root`; the next `begin` clears it.
    """

    def __init__(self, final: str | os.PathLike[str], *, root: Path | None = None) -> None:
        """`root`: by default `.NAME.iobench-staging` next to `final`, with links followed.

        Raises UsageError if `final` is the working directory or above it, since `publish` removes
        the old directory. Raises TransferError for a link that the kernel does not follow.
        """
        if root is None:
            with transfer_errors("staging", final):
                # The kernel refuses links of other users in sticky directories such as /tmp
                # (fs.protected_symlinks); realpath below would follow them.
                existing_file(final)
        self.final = Path(os.path.realpath(final) if root is None else os.path.abspath(final))
        if _holds_working_directory(self.final):
            raise UsageError(
                f"{self.final}: the working directory cannot be replaced; save to one inside it"
            )
        hidden = self.final.with_name(f".{self.final.name}{STAGING_SUFFIX}")
        self.root = hidden if root is None else root
        self.path = self.root / self.final.name

    def begin(self) -> None:
        """Create an empty `root`. Raises TransferError.

        If `final` exists, create `path` too, with the owner, group, permissions (also set-group-ID,
        by which new files inherit the group) and extended attributes of `final`.
        """
        with transfer_errors("staging", self.root):
            self.discard()
            make_directories(self.root.parent)
            self.root.mkdir()
            if self.final.is_dir():
                self.path.mkdir(parents=True)
                _take_after(self.final, self.path)

    def publish(self, *, keep_others: bool = False) -> None:
        """Sync every file and directory of `path`, then replace `final` by it atomically.

        On return the new directory is durable under its name, and the old one is removed. With
        `keep_others`, entries that only the old one has are kept, also those that other processes
        add during the save. Raises TransferError; `final` is unchanged then.
        """
        with transfer_errors("publishing", self.final):
            made = os.listdir(self.path)
            if keep_others and self.final.is_dir():
                _adopt(self.final, self.path, made)
            _sync_tree(self.path)
            make_directories(self.final.parent)
            give = self._exchange if self.final.exists() else self._rename
            give()
            try:
                if keep_others and self.path.is_dir() and _adopt(self.path, self.final, made):
                    _sync_tree(self.final)
                sync_directory(self.final.parent)
            except OSError:  # the name is not durable: undo the rename
                self._exchange() if give == self._exchange else self.final.rename(self.path)
                raise
            self.discard()

    def discard(self) -> None:
        """Remove `root` and its content, if it exists."""
        if os.path.lexists(self.root):
            remove_tree(self.root)

    def _rename(self) -> None:
        self.path.rename(self.final)

    def _exchange(self) -> None:
        exchange(self.path, self.final, self.root / "replaced")


def _holds_working_directory(directory: Path) -> bool:
    try:
        return Path.cwd().is_relative_to(os.path.realpath(directory))
    except FileNotFoundError:  # it was removed already
        return False


def _take_after(old: Path, new: Path) -> None:
    """Copy the metadata of the directory `old` to `new`; owner and group as far as permitted."""
    copy_owner(new, old.stat())
    shutil.copystat(old, new)  # after chown, which clears set-user-ID and set-group-ID


def _adopt(old: Path, new: Path, made: Collection[str] = ()) -> bool:
    """Hard-link the entries of `old` into `new`, except those in `made`.

    An entry of `new` stays unless the one in `old` is newer. Return whether `new` was changed.
    """
    changed = False
    for entry in old.iterdir():
        ours = new / entry.name
        if entry.name in made:
            continue
        if entry.is_dir() and not entry.is_symlink():
            changed |= _adopt_directory(entry, ours)
        elif not os.path.lexists(ours):
            _link(entry, ours)
            changed = True
        elif entry.lstat().st_mtime_ns > ours.lstat().st_mtime_ns:
            aside = new / f".{entry.name}{STAGING_SUFFIX}"
            _link(entry, aside)
            aside.rename(ours)
            changed = True
    return changed


def _adopt_directory(old: Path, new: Path) -> bool:
    if new.is_dir() and not new.is_symlink():
        return _adopt(old, new)
    if os.path.lexists(new):
        return False
    new.mkdir()
    _adopt(old, new)
    _take_after(old, new)
    return True


def _link(source: Path, target: Path) -> None:
    os.link(source, target, follow_symlinks=False)


def _sync_tree(directory: Path) -> None:
    for path, _, files in os.walk(directory, topdown=False, onerror=reraise):
        for file in (Path(path, name) for name in files):
            if not file.is_symlink():
                linux.sync_file(file)
        sync_directory(path)
