"""StagedDirectory: a directory or a file that gets its name when all of it is durable."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import secrets
import shutil
from collections.abc import Collection
from pathlib import Path

from iobench import linux
from iobench.checkpoint.store import STAGING_SUFFIX, exchange, reraise
from iobench.errors import UsageError, transfer_errors
from iobench.writers.local.new_file import (
    copy_owner,
    existing_file,
    make_directories,
    sync_directory,
)
from iobench.writers.own_directory import OwnDirectory, remove_killed

_TRIES = 100
_CHANGED = {errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY}
"""Another process has published or removed `final` since this one has looked."""


class StagedDirectory:
    """Write to `path`, inside the hidden directory `root`; `publish` gives it the name `final`.

    All three are on one file system. Of several processes one calls `begin`, `publish` and
    `discard`, and all write; they share a `token`. Jobs that save to the same `final` at the same
    time have a `root` each, and the last one to publish replaces the other's directory. A killed
    process leaves its `root`; the next `begin` removes it, because its lock is free.
    """

    def __init__(
        self, final: str | os.PathLike[str], *, hidden: Path | None = None, token: str = ""
    ) -> None:
        """`root` is `hidden` with the token in its name; by default `.NAME` next to `final`, with
        links followed. The default of `token` is a new one.

        Raises UsageError if `final` is the working directory or above it, since `publish` removes
        the old directory. Raises TransferError for a link that the kernel does not follow.
        """
        if hidden is None:
            with transfer_errors("staging", final):
                # The kernel refuses links of other users in sticky directories such as /tmp
                # (fs.protected_symlinks); realpath below would follow them.
                existing_file(final)
        self.final = Path(os.path.realpath(final) if hidden is None else os.path.abspath(final))
        if _holds_working_directory(self.final):
            raise UsageError(
                f"{self.final}: the working directory cannot be replaced; save to one inside it"
            )
        self._hidden = hidden or self.final.with_name(f".{self.final.name}")
        self.root = self._hidden.with_name(
            f"{self._hidden.name}.{token or secrets.token_hex(4)}{STAGING_SUFFIX}"
        )
        self.path = self.root / self.final.name
        self._own: OwnDirectory | None = None

    def begin(self) -> None:
        """Create an empty `root`, and remove those of killed processes. Raises TransferError.

        If `final` exists, create `path` too, with the owner, group, permissions (also set-group-ID,
        by which new files inherit the group) and extended attributes of `final`.
        """
        with transfer_errors("staging", self.root):
            make_directories(self.root.parent)
            name = glob.escape(self._hidden.name)
            remove_killed(self._hidden.parent, f"{name}.*{STAGING_SUFFIX}")
            self._own = OwnDirectory(self.root)
            self._own.make()
            if self.final.is_dir():
                self.path.mkdir(parents=True)
                _take_after(self.final, self.path)

    def publish(self, *, keep_others: bool = False) -> None:
        """Sync every file and directory of `path`, then replace `final` by it atomically.

        On return the new directory is durable under its name, and the old one is removed. With
        `keep_others`, entries that only the old one has are kept, also those that other processes
        add during the save. Raises TransferError; `final` is unchanged then, and `root` removed.
        """
        try:
            with transfer_errors("publishing", self.final):
                self._publish(keep_others=keep_others)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error matters
                self.discard()
            raise

    def _publish(self, *, keep_others: bool) -> None:
        made = os.listdir(self.path) if keep_others else []
        if keep_others and self.final.is_dir():
            _adopt(self.final, self.path, made)
        _sync_tree(self.path)
        make_directories(self.final.parent)
        exchanged = self._give_name()
        try:
            if exchanged and keep_others and _adopt(self.path, self.final, made):
                _sync_tree(self.final)
            sync_directory(self.final.parent)
        except OSError:  # the name is not durable: undo the rename
            self._exchange() if exchanged else self.final.rename(self.path)
            raise
        self.discard()

    def discard(self) -> None:
        """Remove `root` and its content, if this process has begun it and it exists."""
        if self._own is not None:
            self._own.remove()

    def _give_name(self) -> bool:
        """Rename `path` to `final`. Return whether it was exchanged with an older directory.

        Another process may publish or remove `final` at any time.
        """
        for left in reversed(range(_TRIES)):
            try:
                if self.final.exists():
                    self._exchange()
                    return True
                self.path.rename(self.final)
                return False
            except OSError as error:
                if not left or error.errno not in _CHANGED:
                    raise
        raise AssertionError  # the last try returns or raises

    def _exchange(self) -> None:
        exchange(self.path, self.final, self.root / "replaced")


def shared_token() -> str:
    """Return random digits for the name of a staging directory; all ranks of a job call this.

    Needs accelerate, and returns what rank 0 has drawn.
    """
    from accelerate.utils import broadcast_object_list

    token: str = broadcast_object_list([secrets.token_hex(4)])[0]
    return token


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
    if directory.is_file():
        linux.sync_file(directory)
        return
    for path, _, files in os.walk(directory, topdown=False, onerror=reraise):
        for file in (Path(path, name) for name in files):
            if not file.is_symlink():
                linux.sync_file(file)
        sync_directory(path)
