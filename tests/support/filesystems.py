"""File systems that fail, and what is left of them."""

from __future__ import annotations

import fcntl
import functools
import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["after_power_cut", "chroot", "no_private_mounts", "shut_down"]


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
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
