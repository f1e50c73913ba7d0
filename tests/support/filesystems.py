"""File systems to mount, that fail, and what is left of them."""

import fcntl
import functools
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from iobench.units import MIB

_MKFS = {"ext4": ("-m", "0"), "xfs": (), "btrfs": ()}  # no room kept for root, who is us
_NEEDS = {"fuse": "bindfs", **{kind: f"mkfs.{kind}" for kind in _MKFS}}


class Filesystems:
    """Mounts below one directory; whatever was mounted is undone, in reverse, by `undo`."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._undo: list[list[str]] = []
        self._images: Path | None = None

    def make(self, kind: str, size_bytes: int = 512 * MIB, *, options: str = "rw") -> Path:
        """Return the directory of a new, mounted file system of `kind`: tmpfs, ramfs, ext4, xfs,
        btrfs, overlay or fuse (bindfs). The last two are on an ext4 of their own. `options` are
        those of a mount from an image. Raises OSError where it cannot be mounted."""
        if os.geteuid() != 0:
            raise PermissionError("mounting needs root")
        needed = _NEEDS.get(kind)
        if needed and not shutil.which(needed):
            raise OSError(f"{needed} is not installed")
        below = self.make("ext4", size_bytes) if kind in ("overlay", "fuse") else None
        at = self._base / f"{kind}-{len(self._undo)}"
        at.mkdir()
        if kind in ("tmpfs", "ramfs"):  # the latter has no limit
            self._mount("-t", kind, "-o", f"size={size_bytes}", "iobench-test", str(at))
        elif below is None:
            self._mount_image(kind, size_bytes, at, options)
        else:
            self._mount_over(kind, below, at)
        return at

    def undo(self) -> None:
        """Unmount all of them."""
        for command in reversed(self._undo):
            _run(*command)
        self._undo.clear()

    def _mount_image(self, kind: str, size_bytes: int, at: Path, options: str) -> None:
        if self._images is None:  # in memory, so that syncs cost nothing
            images = self._base / "images"
            images.mkdir()
            self._mount("-t", "tmpfs", "-o", "size=4g", "iobench-test", str(images))
            self._images = images
        image = self._images / f"{at.name}.img"
        image.touch()
        os.truncate(image, size_bytes)
        _run(f"mkfs.{kind}", "-q", *_MKFS[kind], image)
        # A device of our own and not `mount -o loop`: it detaches itself once it is unmounted.
        device = _run("losetup", "--find", "--show", image)
        try:
            self._mount("-o", options, device, str(at))
        finally:
            _run("losetup", "--detach", device)

    def _mount_over(self, kind: str, below: Path, at: Path) -> None:
        parts = {name: below / name for name in ("lower", "upper", "work")}
        for part in parts.values():
            part.mkdir()
        if kind == "overlay":
            options = ",".join(f"{name}dir={part}" for name, part in parts.items())
            self._mount("-t", "overlay", "-o", options, "iobench-test", str(at))
        else:
            _run("bindfs", parts["upper"], at)
            self._undo.append(["umount", "--lazy", str(at)])

    def _mount(self, *arguments: str) -> None:
        _run("mount", *arguments)
        self._undo.append(["umount", "--lazy", arguments[-1]])


@functools.cache
def chroot() -> str | None:
    """Why a process cannot enter a mount namespace and find its files there: it gets the root of
    the namespace (setns(2)), and its own is another one. None if it can."""
    command = ["nsenter", "--mount=/proc/self/ns/mnt", "stat", "--format=%d:%i", "/"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    own = os.stat("/")
    if done.returncode or done.stdout.strip() == f"{own.st_dev}:{own.st_ino}":
        return None
    return "this is a chroot, which whoever enters a mount namespace leaves"


@functools.cache
def no_private_mounts() -> str | None:
    """Why a process cannot have mounts that no other process sees; None if it can. In a chroot
    whose root is not a mount point, mounts would be seen outside."""
    if found := chroot():
        return found
    command = ["unshare", "--mount", "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"no private mounts can be made here: {done.stderr.strip()}" if done.returncode else None


def shut_down(root: Path) -> None:
    """End the ext4 file system at once, as when its device disappears (EXT4_IOC_SHUTDOWN,
    ext4.h)."""
    fd = os.open(root, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, 0x8004587D, struct.pack("I", 2))
    finally:
        os.close(fd)


@contextmanager
def after_power_cut(root: Path, tmp_path: Path) -> Iterator[Path]:
    """Mount the current content of the device of `root`."""
    image = Path(_run("losetup", "-nO", "BACK-FILE", _run("findmnt", "-no", "SOURCE", root)))
    copy, found = image.with_suffix(".cut"), tmp_path / "after"
    _run("cp", "--sparse=always", image, copy)
    found.mkdir()
    device = _run("losetup", "--find", "--show", copy)
    try:
        options = ["-o", "nouuid"] if _run("findmnt", "-no", "FSTYPE", root) == "xfs" else []
        _run("mount", *options, device, found)
        try:
            yield found
        finally:
            _run("umount", found)
    finally:
        _run("losetup", "--detach", device)
        copy.unlink()
        found.rmdir()


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")
    return done.stdout.strip()
